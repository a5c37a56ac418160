"""The embedded mode: a coordinator and a worker inside the command, and the exports that ran so on this machine."""

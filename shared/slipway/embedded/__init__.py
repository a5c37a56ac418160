"""The embedded mode: a coordinator and a worker inside the command, and the embedded exports of this machine."""

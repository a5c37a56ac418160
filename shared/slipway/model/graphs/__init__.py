"""Common code for the graphs of exported models, for their makers and runtimes."""

"""Run work that a file controls, such as a template that loops, in a process with limits of time and memory."""

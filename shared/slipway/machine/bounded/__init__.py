"""Work that a file decides, such as a template that loops: done in a process with limits of time and memory, which may be ended."""

"""The parts of the merge that use peft's own code."""

"""What peft's own code is needed for."""

"""The protocol between the stage and its runner processes."""

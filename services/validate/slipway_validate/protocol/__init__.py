"""Between the stage and its runner processes."""

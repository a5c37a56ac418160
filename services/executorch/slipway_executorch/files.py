"""Names of the files of an output."""

PROGRAM, DESCRIPTION = "model.pte", "executorch.json"

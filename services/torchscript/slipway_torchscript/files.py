"""Names of the files of an output."""

SCRIPT, PROGRAM, COMPILED = "model.pt", "model.pt2", "model.aoti.pt2"
DESCRIPTIONS = {SCRIPT: "torchscript.json", PROGRAM: "torch_export.json"}
"""File beside a graph that says what it takes and gives."""

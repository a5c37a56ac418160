"""The inputs of a validation beside the outputs that it judges: their names, and the file of the user's test inputs."""

from __future__ import annotations

from pathlib import Path

ADAPTER = "adapter"
"""Name of the adapter that was trained."""
HELDOUT, TEST_INPUTS = "heldout", "test_inputs"
"""Names of the held-out text and of the user's test inputs."""
NOT_OUTPUTS = (ADAPTER, "base", "before", HELDOUT, "reference", TEST_INPUTS)
"""Inputs of the validation that are no outputs of the export, so that no format may have their names."""
ENDINGS = (".jsonl", ".json", ".txt")
"""Endings of a file of test inputs."""
LARGEST = 16 << 20
"""Largest file of test inputs, bytes."""

_OUTPUT = "output."


def input_of(output: str) -> str:
    """Return the name of the input that brings an output: a prefix tells an output from another input of its name."""
    return f"{_OUTPUT}{output}" if output in NOT_OUTPUTS else output


def output_of(name: str) -> str:
    """Return the name of the output that an input brings."""
    return name.removeprefix(_OUTPUT)


def files_of_test_inputs(folder: Path) -> list[Path]:
    """Return the files in a folder that may hold test inputs, sorted; exactly one of them can be used."""
    return sorted(path for path in folder.glob("*") if path.suffix in ENDINGS)

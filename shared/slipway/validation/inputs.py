"""The inputs of a validation beside the outputs that it judges: their names, the file of the user's test inputs, and their sound files."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Literal

ADAPTER = "adapter"
"""Name of the adapter that was trained."""
HELDOUT, TEST_INPUTS = "heldout", "test_inputs"
"""Names of the held-out text and of the user's test inputs."""
OWN_TEXT = "own_text"
"""Name of the text like that of the training, on which the adapter is judged: a file beside the run, or the text for calibration."""
NOT_OUTPUTS = (ADAPTER, "base", "before", HELDOUT, OWN_TEXT, "reference", TEST_INPUTS)
"""Inputs of the validation that are no outputs of the export, so that no format may have their names."""
ENDINGS = (".jsonl", ".json", ".txt")
"""Endings of a file of test inputs."""
LARGEST = 16 << 20
"""Largest file of test inputs, bytes."""
AUDIO, SOUND_ENDING = "audio", ".wav"
"""Field of a record that names a sound file, and the ending of these files."""
LARGEST_SOUND = 16 << 20
"""Largest sound file, bytes: 30 seconds at 48 kHz in two channels of 32 bits have 11.5 million."""

_OUTPUT = "output."

Effort = Literal["quick", "standard", "thorough"]
"""``standard`` is the full evidence; ``quick`` leaves some of it out, ``thorough`` adds to it."""


def input_of(output: str) -> str:
    """Return the name of the input that holds an output; a prefix tells it from another input of the same name."""
    return f"{_OUTPUT}{output}" if output in NOT_OUTPUTS else output


def output_of(name: str) -> str:
    """Return the name of the output that an input holds."""
    return name.removeprefix(_OUTPUT)


def files_of_test_inputs(folder: Path) -> list[Path]:
    """Return the files in a folder that may hold test inputs, sorted; exactly one of them can be used."""
    return sorted(path for path in folder.glob("*") if path.suffix in ENDINGS)


def is_sound_name(name: object) -> bool:
    """Return whether a name is that of a sound file below the folder of the test inputs."""
    if not isinstance(name, str) or "\\" in name or not name.isprintable():
        return False
    path = PurePosixPath(name)
    return path.suffix.lower() == SOUND_ENDING and not path.is_absolute() and ".." not in path.parts

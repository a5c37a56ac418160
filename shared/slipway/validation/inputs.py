"""The inputs of a validation beside the outputs that it judges: their names, and the files of the user's test inputs.

Test inputs travel as an artifact: one file of records, and the sounds that they name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from slipway.errors import ConfigurationError
from slipway.files.json_documents import LARGEST_LIST, parse_json
from slipway.files.paths import file_in
from slipway.files.regular_file import read_regular
from slipway.texts import quoted

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

_TEST_INPUTS_KEY = "validation.test_input_samples"


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


def find_test_inputs(path: Path) -> Path:
    """Return the file of test inputs.

    Args:
        path: The file, or a folder that has one such file.

    Raises:
        ConfigurationError: There is none, there are several, or it is too large.
    """
    files = [path] if path.is_file() else files_of_test_inputs(path)
    if len(files) != 1 or files[0].suffix not in ENDINGS:
        names = quoted([each.name for each in files]) if path.is_dir() and files else "none"
        raise _unusable_error(
            f"{path} is not a file of the kinds {', '.join(ENDINGS)}, nor a folder with one of them: it has {names}"
        )
    if files[0].stat().st_size > LARGEST:
        raise _unusable_error(f"{files[0]} has {files[0].stat().st_size} bytes, {LARGEST} are allowed")
    return files[0]


def find_sounds(file: Path, *, here: bool) -> tuple[Path, ...]:
    """Return the sound files that the records of a file name, below its folder.

    Args:
        file: The file of test inputs.
        here: False if its content is not here, as with an import: all sounds below its folder are returned.

    Raises:
        ConfigurationError: A name leads out of the folder or is that of no sound, or the file is missing or too large.
        ArtifactError: ``ARTIFACT_INVALID``: a link leads out of the folder.
    """
    folder = file.parent
    if not here:
        return tuple(sorted(path for path in folder.rglob("*") if path.suffix.lower() == SOUND_ENDING))
    names = sorted({record[AUDIO] for record in _records(file) if isinstance(record.get(AUDIO), str)})
    for name in names:
        if not is_sound_name(name):
            raise _unusable_error(
                f"{quoted(name)} is not a {SOUND_ENDING} file below the folder of {file.name}",
                "put sounds beside that file, and name them relative to it",
            )
        sound = file_in(folder, name)
        size = sound.stat().st_size if sound is not None else 0
        if not 0 < size <= LARGEST_SOUND:
            what = "does not exist" if sound is None else f"has {size} bytes, 1 to {LARGEST_SOUND} are allowed"
            raise _unusable_error(
                f"the sound {quoted(name)} {what}", "name sounds relative to the file, each of at most 30 s"
            )
    return tuple(folder / name for name in names)


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file; skip anything else, which the validation reports."""
    if file.suffix == ".txt":
        return
    try:
        data = read_regular(file, largest=LARGEST)
    except OSError as error:
        raise _unusable_error(f"{file} cannot be read: {error}") from error
    if f'"{AUDIO}"'.encode() not in data:
        return
    for part in [data] if file.suffix == ".json" else data.splitlines():
        try:
            value = parse_json(part, most_values=LARGEST_LIST // 16)
        except ValueError:
            continue
        yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict))


def _unusable_error(what: str, remedy: str = "name such a file, or leave the setting out") -> ConfigurationError:
    return ConfigurationError(f"{_TEST_INPUTS_KEY}: {what}", remedy=remedy, about={"key": _TEST_INPUTS_KEY})

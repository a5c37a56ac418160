"""Find the files of the user's test inputs, which travel as an artifact."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import ConfigurationError
from slipway.texts import quoted
from slipway.validation.inputs import ENDINGS, LARGEST, files_of_test_inputs

KEY = "validation.test_input_samples"


def find_test_inputs(path: Path) -> Path:
    """Return the file of test inputs, which is alone in its artifact.

    Args:
        path: The file, or a folder that has one such file.

    Raises:
        ConfigurationError: There is none, there are several, or it is too large.
    """
    found = [path] if path.is_file() else files_of_test_inputs(path)
    if len(found) != 1 or found[0].suffix not in ENDINGS:
        names = quoted([each.name for each in found]) if path.is_dir() and found else "none"
        raise _unusable(
            f"{path} is not a file of the kinds {', '.join(ENDINGS)}, nor a folder with one of them: it has {names}"
        )
    if found[0].stat().st_size > LARGEST:
        raise _unusable(f"{found[0]} has {found[0].stat().st_size} bytes, {LARGEST} are allowed")
    return found[0]


def _unusable(what: str) -> ConfigurationError:
    remedy = "name such a file, or leave the setting out"
    return ConfigurationError(f"{KEY}: {what}", remedy=remedy, about={"key": KEY})

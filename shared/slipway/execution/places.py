"""Name files in a failure as the user knows them: by input, and never by a task's scratch folder, which is gone by then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from slipway.errors import Failure


def with_named_places(failure: Failure, *, inputs: Mapping[str, Path], workdir: Path) -> Failure:
    """Return a failure whose texts name ``base/config.json`` in place of the path where the task had it.

    Args:
        failure: The failure.
        inputs: Folders of the task's inputs, by the input's name.
        workdir: The task's work folder.
    """
    names = {str(folder): name for name, folder in inputs.items()} | {
        f"{workdir}/": "",
        str(workdir): "the work folder",
    }

    def named(text: str) -> str:
        # The longest first: one folder's path may begin with another's.
        for folder in sorted(names, key=len, reverse=True):
            text = text.replace(folder, names[folder])
        return text

    return replace(
        failure,
        message=named(failure.message),
        remedy=named(failure.remedy),
        about={key: named(value) for key, value in failure.about.items()},
    )

"""Write an IR without the indentation of its description, which is a fifth of it."""

from __future__ import annotations

from pathlib import Path

from slipway_openvino.library import ov

_LINES = (b"<layer ", b"<edge ")
"""Elements that begin a line: a layer stays a line of its own, for people and their tools."""


def save_model(model: ov.Model, path: Path, *, halves: bool) -> None:
    """Write the ``.xml`` of a model and the ``.bin`` beside it.

    Args:
        model: The model.
        path: The ``.xml``.
        halves: Store floats in half precision.
    """
    ov.save_model(model, path, compress_to_fp16=halves)
    joined = path.with_suffix(".joined")
    join_lines(path, joined)
    joined.replace(path)


def join_lines(source: Path, target: Path) -> None:
    """Copy a description without the space between its elements. One line is in memory at a time.

    Only a line's end between ``>`` and ``<`` is left out, with the tabs that follow. No value has these: ``<`` is escaped there.
    """
    with source.open("rb") as lines, target.open("wb") as joined:
        ends_element = False
        for line in lines:
            element = line.lstrip(b"\t")
            is_between = ends_element and element.startswith(b"<")
            if ends_element and (not is_between or element.startswith(_LINES)):
                joined.write(b"\n")
            ends_element = line.endswith(b">\n")
            text = element if is_between else line
            joined.write(text.removesuffix(b"\n") if ends_element else text)
        if ends_element:
            joined.write(b"\n")

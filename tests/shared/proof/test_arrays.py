"""Files of arrays that come from anywhere are mapped, or refused in one way whatever their header says."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from slipway.proof.arrays import map_array


def with_header(path: Path, header: str) -> Path:
    """Write a file of an array with a header, and some bytes behind it."""
    line = header.encode() + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + bytes(64))
    return path


def of_shape(shape: str) -> str:
    """Return the header of an array of a shape."""
    return f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}}}"


def test_an_array_is_mapped(tmp_path: Path) -> None:
    mapped = map_array(with_header(tmp_path / "a.npy", of_shape("(2, 3)")))
    assert isinstance(mapped, np.memmap)
    assert (mapped.shape, mapped.dtype) == ((2, 3), np.uint16)


@pytest.mark.parametrize(
    "header",
    [
        of_shape("(2**70, 1, 1)"),
        of_shape(f"({1 << 70}, 1, 1)"),
        of_shape(f"({1 << 62},)"),
        of_shape("(-1,)"),
        of_shape("(True, 1, 1)"),
        of_shape("(2, 3"),
        of_shape("(" * 2000),
        of_shape("-" * 5000 + "1"),
        of_shape("(2, 3)").replace("'<u2'", "('<u2',)"),
        of_shape("(2, 3)").replace("'<u2'", "[('a',)]"),
        of_shape("(2, 3)").replace("'<u2'", "'O'"),
        "\x00",
        "[1, 2]",
        "{1: 2, 'a': 3}",
    ],
)
@pytest.mark.filterwarnings("ignore:Reading `.npy`", "ignore:overflow encountered")
def test_a_header_that_describes_no_array_is_refused(header: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^a\.npy is no array: "):
        map_array(with_header(tmp_path / "a.npy", header))


def test_a_file_that_ends_early_and_a_pipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"\x93NUM")
    os.mkfifo(tmp_path / "b.npy")
    with pytest.raises(ValueError, match="magic"):
        map_array(tmp_path / "a.npy")
    with pytest.raises(OSError, match="pipe"):
        map_array(tmp_path / "b.npy")

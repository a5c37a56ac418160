"""Prompts with a picture that come from elsewhere are checked before anything is computed of them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipway.proof.sights import Sight, read_sights, write_sights
from slipway.validation.pictures import Sense

GOOD = Sight(
    tokens=np.array([5, 9, 9, 6, 7]),
    begin=1,
    end=3,
    token=9,
    continued=1,
    arguments={"pixel_values": np.zeros((1, 3, 4, 4), np.float32)},
    types="",
    pixels=np.zeros((4, 4, 3), np.uint8),
    mean=(0.5, 0.5, 0.5),
    deviation=(0.5, 0.5, 0.5),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_sights([GOOD, replace(GOOD, token=8)], tmp_path)
    read = read_sights(tmp_path)
    assert [each.token for each in read] == [9, 8]
    assert np.array_equal(read[0].tokens, GOOD.tokens)
    assert [each.name for each in tmp_path.iterdir()] == [Sense.PICTURES.value]


def test_a_model_without_pictures_has_no_folder(tmp_path: Path) -> None:
    write_sights([], tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert read_sights(tmp_path) == []


def _zipped(folder: Path) -> None:
    with zipfile.ZipFile(folder / "tokens.npy", "w") as file:
        file.writestr("tokens", b"")


def _objects(folder: Path) -> None:
    np.save(folder / "argument.pixel_values.npy", np.array([{}], dtype=object), allow_pickle=True)


def _many(folder: Path) -> None:
    for number in range(12):
        np.save(folder / f"argument.more{number}.npy", np.zeros(1))


def _long(folder: Path) -> None:
    np.save(folder / "tokens.npy", np.zeros(1 << 16, np.int64))


@pytest.mark.parametrize(
    ("change", "said"),
    [(_zipped, "magic"), (_objects, "object"), (_many, "arguments"), (_long, "65536 tokens")],
)
def test_files_of_another_kind_are_refused(change: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    write_sights([GOOD], tmp_path)
    change(tmp_path / Sense.PICTURES / "00")
    with pytest.raises(ValueError, match=said):
        read_sights(tmp_path)


@pytest.mark.parametrize("sense", list(Sense))
def test_a_refusal_names_the_sense(sense: Sense, tmp_path: Path) -> None:
    write_sights([replace(GOOD, sense=sense)], tmp_path)
    meta = tmp_path / sense / "00" / "sight.json"
    meta.write_text(meta.read_text().replace('"begin": 1', '"begin": 4'))
    with pytest.raises(
        ValueError, match=rf"^00 is no prompt with {sense.beside}: its {sense.one} lies from 4 to 3 of 5"
    ):
        read_sights(tmp_path, sense)

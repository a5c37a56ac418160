"""Prompts with a picture, or with sound: what all models of one validation get, kept as arrays in one folder each. They lie in a folder with
the name of their sense within that of the samples, and what a model computes of them in one of that name within that of its results.

Axes: T = tokens of a prompt, H = height, W = width.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipway.files.json_documents import read_json_object
from slipway.proof.arrays import map_array
from slipway.proof.numerics import Ints
from slipway.validation.pictures import Sense

_META, _TOKENS, _PIXELS, _ARGUMENT = "sight.json", "tokens.npy", "pixels.npy", "argument."
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
LARGEST = 1 << 26
"""Bytes of one array."""
_MOST, _MOST_ARGUMENTS = 8, 8
"""Prompts, and arguments of each."""
MOST_TOKENS = 1 << 15
"""Tokens of a prompt."""
Colours = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Sight:
    """A prompt: some text, a picture or sound, and text again, whose results are compared.

    Attributes:
        tokens: Its tokens, (T,).
        begin: Place of the first token that stands for the picture.
        end: Place behind the last one.
        token: The token that stands for a feature of the picture. Others between ``begin`` and ``end`` part its rows.
        continued: Number of the last tokens that continue the prompt as the reference does.
        arguments: What the class of transformers takes for the picture, by name.
        types: Name of the argument that marks the picture's tokens with 1; empty if the class takes none.
        pixels: The picture, (H, W, 3), bytes; of a size that no processor changes. Without pixels for sound.
        mean: Mean of each colour, by which the arguments are normalized.
        deviation: Their deviation.
        colours_known: Whether the model's own files say so; otherwise a runtime that normalizes pixels itself may do otherwise.
        sense: What it has beside text.
    """

    tokens: Ints
    begin: int
    end: int
    token: int
    continued: int
    arguments: Mapping[str, npt.NDArray[Any]]
    types: str
    pixels: npt.NDArray[np.uint8]
    mean: Colours
    deviation: Colours
    colours_known: bool = True
    sense: Sense = Sense.PICTURES

    @property
    def compared(self) -> int:
        """Return the number of tokens behind the picture, whose results are compared."""
        return len(self.tokens) - self.end

    @property
    def features(self) -> int:
        """Return the number of tokens that stand for the picture, with those that part its rows."""
        return self.end - self.begin

    def write(self, folder: Path) -> None:
        """Write it into a new folder."""
        folder.mkdir(parents=True)
        names = ("begin", "end", "token", "continued", "types", "mean", "deviation", "colours_known")
        meta = {name: getattr(self, name) for name in names}
        meta |= {} if self.sense is Sense.PICTURES else {"sense": self.sense}
        (folder / _META).write_text(json.dumps(meta), encoding="utf-8")
        np.save(folder / _TOKENS, self.tokens)
        np.save(folder / _PIXELS, self.pixels)
        for name, values in self.arguments.items():
            np.save(folder / f"{_ARGUMENT}{name}.npy", values)

    @classmethod
    def read(cls, folder: Path) -> Sight:
        """Read one written by :meth:`write`; the folder may come from anywhere.

        Raises:
            ValueError: It is no such folder.
            OSError: A file cannot be read.
        """
        sense = Sense.PICTURES
        try:
            meta = read_json_object(folder / _META)
            sense = Sense(meta.get("sense", sense))
            names = [each.name[len(_ARGUMENT) : -len(".npy")] for each in sorted(folder.glob(f"{_ARGUMENT}*.npy"))]
            sight = cls(
                tokens=_load(folder / _TOKENS),
                pixels=_load(folder / _PIXELS),
                arguments={name: _load(folder / f"{_ARGUMENT}{name}.npy") for name in names[: _MOST_ARGUMENTS + 1]},
                mean=_colours(meta["mean"]),
                deviation=_colours(meta["deviation"]),
                colours_known=bool(meta["colours_known"]),
                types=str(meta["types"]),
                sense=sense,
                **{key: int(meta[key]) for key in ("begin", "end", "token", "continued")},
            )
        except (KeyError, TypeError, ValueError, EOFError) as error:
            raise ValueError(f"{folder.name} is no prompt with {sense.beside}: {error}") from error
        if wrong := sight.fault:
            raise ValueError(f"{folder.name} is no prompt with {sense.beside}: {wrong}")
        return sight

    @property
    def fault(self) -> str:
        """Return what is wrong with it; empty if nothing is."""
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu" or self.tokens.min(initial=0) < 0:
            return f"its tokens have the shape {self.tokens.shape} and the type {self.tokens.dtype}"
        if len(self.tokens) > MOST_TOKENS or len(self.arguments) > _MOST_ARGUMENTS:
            return f"it has {len(self.tokens)} tokens, and {len(self.arguments)} arguments for its {self.sense.one}"
        if not 0 <= self.begin < self.end < len(self.tokens) or not 0 <= self.continued <= self.compared:
            return f"its {self.sense.one} lies from {self.begin} to {self.end} of {len(self.tokens)} tokens"
        if self.pixels.ndim != 3 or self.pixels.shape[2] != 3 or self.pixels.dtype != np.uint8:
            return f"its pixels have the shape {self.pixels.shape} and the type {self.pixels.dtype}"
        strange = next((name for name in (*self.arguments, self.types or "x") if not _NAME.fullmatch(name)), "")
        return f"{strange!r} is no name of an argument" if strange else ""


def read_sights(samples: Path, sense: Sense = Sense.PICTURES) -> list[Sight]:
    """Read the prompts of a sense beside the samples of a validation; none if its model does not have it.

    Raises:
        ValueError: The folder holds something else.
        OSError: A file cannot be read.
    """
    folder = samples / sense
    folders = sorted(folder.iterdir()) if folder.is_dir() else []
    if len(folders) > _MOST:
        raise ValueError(f"there are {len(folders)} prompts with {sense}")
    sights = [Sight.read(each) for each in folders]
    if other := next((each.sense for each in sights if each.sense is not sense), None):
        raise ValueError(f"the folder {sense} has a prompt with {other}")
    return sights


def write_sights(sights: list[Sight], samples: Path) -> None:
    """Write prompts of one sense beside the samples of a validation: all, or none."""
    for number, sight in enumerate(sights):
        sight.write(samples / f".{sight.sense}" / f"{number:02}")
    if sights:
        (samples / f".{sights[0].sense}").rename(samples / sights[0].sense)


def _load(path: Path) -> npt.NDArray[Any]:
    values = map_array(path)
    if values.nbytes > LARGEST or values.dtype.kind not in "iufb":
        raise ValueError(f"{path.name} has {values.size} values of the type {values.dtype}")
    return np.array(values)


def _colours(values: Any) -> Colours:
    first, second, third = (float(each) for each in values)
    return first, second, third

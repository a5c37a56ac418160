"""Read and write the inputs that all models of one validation get, as arrays in one folder.

N = samples, T = tokens of one, S = tokens that the encoder of an encoder–decoder reads, P = compared results.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipway.proof.numerics import Ints

OWN_FILE, OWN_FOLDER, EVIDENCE_FILE = "own_text.json", "own_text", "own_evidence.json"
"""File of the texts to judge the adapter on, beside the text of the samples; folder of their samples, beside the samples' folder; and file of
what was measured on them, in the folder of the run."""
Values = npt.NDArray[Any]
"""Token ids (B, S), or features of sound (B, F, frames)."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs and labels of all samples.

    Attributes:
        tokens: Input of a decoder or an encoder, (N, T); for an encoder–decoder, the decoder's input.
        source: Input of the encoder of an encoder–decoder: token ids (N, S) or features (N, F, frames).
        positions: Tokens whose results are compared, (N, P); None means all.
        labels: The token that each result predicts, (N, P); None if results predict no tokens.
    """

    tokens: Ints
    source: Values | None = None
    positions: Ints | None = None
    labels: Ints | None = None

    def write(self, folder: Path) -> None:
        """Write them into a new folder."""
        folder.mkdir(parents=True)
        for each in fields(self):
            if (values := getattr(self, each.name)) is not None:
                np.save(folder / f"{each.name}.npy", values)

    @classmethod
    def read(cls, folder: Path) -> Samples:
        """Read samples written by :meth:`write`."""
        paths = {each.name: folder / f"{each.name}.npy" for each in fields(cls)}
        return cls(**{name: np.load(path) for name, path in paths.items() if name == "tokens" or path.is_file()})

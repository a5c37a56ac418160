"""Keep finished pieces of an interrupted calibration for the next attempt.

A piece is a safetensors file beside a small record: what it was made from, its SHA-256, and its facts. It is reused only if it was
made from the same and its content, read again, has that digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.files.regular_file import sha256_of
from slipway.model.safetensors_file import read_safetensors
from slipway_quantize.model_weights import map_tensor


class Finished:
    """A folder of finished pieces.

    Args:
        folder: An existing folder, for this calibration alone.
        identity: What all pieces are made from.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder = folder
        self._identity = identity

    def put(self, name: str, tensors: Mapping[str, Tensor], **facts: Any) -> None:
        """Store a piece; it counts once its record is in place."""
        path = self._path(name)
        written = path.with_suffix(".new")
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, written)
        record = {"identity": self._identity, "sha256": sha256_of(written), "facts": facts}
        self._record(name).unlink(missing_ok=True)
        written.replace(path)
        new = self._record(name).with_suffix(".part")
        new.write_text(json.dumps(record), encoding="utf-8")
        new.replace(self._record(name))

    def has(self, name: str) -> bool:
        """Return whether there is a valid piece of this name."""
        try:
            record = read_json_object(self._record(name), largest=LARGEST_LIST)
            return record.get("identity") == self._identity and record.get("sha256") == sha256_of(self._path(name))
        except (OSError, ValueError):
            return False

    def get(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a piece, mapped from its file."""
        return {key: map_tensor(tensor) for key, tensor in read_safetensors(self._path(name)).tensors.items()}

    def facts(self, name: str) -> dict[str, Any]:
        """Return the facts of a piece."""
        facts: dict[str, Any] = read_json_object(self._record(name), largest=LARGEST_LIST)["facts"]
        return facts

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _record(self, name: str) -> Path:
        return self.folder / f"{name}.json"

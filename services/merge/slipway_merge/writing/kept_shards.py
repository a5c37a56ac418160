"""Keep finished shards of an interrupted merge for the next attempt.

A shard is kept as a hard link beside a small record of its plan, its SHA-256, and the statistics of its changes. It is reused only if
the plan is the same and its content, read again, has that digest; otherwise it is written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from slipway.files.json_documents import LARGEST_LIST
from slipway.files.regular_file import read_regular
from slipway_merge.plan.layout import OutputTensor, Shard
from slipway_merge.tensors.deltas import Change
from slipway_merge.tensors.values import Factor

_HASH_BYTES = 1 << 20


@dataclass
class Written:
    """Statistics of the written files.

    Attributes:
        changes: Statistics of each updated weight.
        copied: Number of tensors whose bytes were copied.
        converted: Number of tensors that only changed their data type.
    """

    changes: list[Change] = field(default_factory=list)
    copied: int = 0
    converted: int = 0

    def add(self, other: Written) -> None:
        """Add the statistics of another part of the output."""
        self.changes += other.changes
        self.copied += other.copied
        self.converted += other.converted


@dataclass(frozen=True)
class KeptShard:
    """The record beside a kept shard."""

    identity: str
    sha256: str
    written: Written


class KeptShards:
    """The folder of kept shards; without one, nothing is kept.

    Args:
        folder: A folder on the output's file system, for this merge alone.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def keep(self, shard: Shard, path: Path, *, sha256: str, written: Written) -> None:
        """Keep a finished shard as a second hard link; it is read-only from then on."""
        if self._folder is None:
            return
        kept, record = self._paths(self._folder, shard)
        document = asdict(KeptShard(_identity(shard), sha256, written))
        with contextlib.suppress(OSError):  # no hard links or no space here: the merge continues without keeping it
            kept.unlink(missing_ok=True)
            path.chmod(0o444)
            kept.hardlink_to(path)
            record.write_text(json.dumps(document), encoding="utf-8")

    def take(self, shard: Shard, path: Path, *, on_bytes: Callable[[int], None]) -> KeptShard | None:
        """Link a kept shard to ``path``; return None if there is no valid one.

        Args:
            shard: The wanted shard.
            path: Its place in the output, which does not exist yet.
            on_bytes: Called with the number of bytes read so far, to show progress or to raise.
        """
        if self._folder is None:
            return None
        kept, record = self._paths(self._folder, shard)
        try:
            entry = TypeAdapter(KeptShard).validate_json(read_regular(record, largest=LARGEST_LIST), strict=True)
            if entry.identity != _identity(shard) or kept.stat().st_size != shard.nbytes:
                return None
            path.hardlink_to(kept)  # before the check, so that the checked bytes are the output's
        except (OSError, ValidationError):
            return None
        if _digest(path, on_bytes) == entry.sha256:
            return entry
        path.unlink()
        return None

    @staticmethod
    def _paths(folder: Path, shard: Shard) -> tuple[Path, Path]:
        return folder / shard.filename, folder / f"{shard.filename}.json"


def _digest(path: Path, on_bytes: Callable[[int], None]) -> str:
    sha = hashlib.sha256()
    buffer = memoryview(bytearray(_HASH_BYTES))
    position = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha.update(buffer[:count])
            position += count
            on_bytes(position)
    return sha.hexdigest()


def _identity(shard: Shard) -> str:
    """Return the digest of the plan of a shard's bytes.

    It need not cover the inputs' content: a kept folder belongs to one action, whose key has the digests of its inputs.
    """
    sha = hashlib.sha256(shard.header)
    for tensor in shard.tensors:
        sha.update(json.dumps(_origin(tensor)).encode() + b"\n")
    return sha.hexdigest()


def _origin(tensor: OutputTensor) -> list[object]:
    source, update, computed = tensor.value.source, tensor.value.update, tensor.value.computed
    origin: list[object] = [tensor.name, source.file.name, source.name, source.dtype, source.shape, source.start]
    if update is not None:
        origin += [update.module, _factor(update.left), _factor(update.right), update.scaling]
    if computed is not None:
        origin += [computed.module, computed.form]
    return origin


def _factor(factor: Factor) -> list[object]:
    info = factor.info
    return [info.file.name, info.name, info.dtype, info.shape, info.start, factor.transposed]

"""Finished shards that outlast an interrupted merge, so that the next attempt goes on with them.

A shard is kept as a hard link beside a small record: what it was made from, its SHA-256, and the accounting of its changes. One is
taken only if it was made from the same plan and its content, read again, has that digest; every other one is made anew.
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
    """What was written.

    Attributes:
        changes: What happened to each updated weight.
        copied: Number of tensors whose bytes were copied.
        converted: Number of tensors that only changed their data type.
    """

    changes: list[Change] = field(default_factory=list)
    copied: int = 0
    converted: int = 0

    def add(self, other: Written) -> None:
        """Count what is in another part of the output too."""
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
        folder: On the output's file system, of this merge alone.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def keep(self, shard: Shard, path: Path, *, sha256: str, written: Written) -> None:
        """Keep a finished shard. It is read-only from here on: its bytes have a second name."""
        if self._folder is None:
            return
        kept, record = self._paths(self._folder, shard)
        document = asdict(KeptShard(_identity(shard), sha256, written))
        with contextlib.suppress(OSError):  # no links here, or no space: the merge does without
            kept.unlink(missing_ok=True)
            path.chmod(0o444)
            kept.hardlink_to(path)
            record.write_text(json.dumps(document), encoding="utf-8")

    def take(self, shard: Shard, path: Path, *, on_bytes: Callable[[int], None]) -> KeptShard | None:
        """Give a kept shard the name ``path``; None when there is none that is right.

        Args:
            shard: The shard that is wanted.
            path: Its place in the output; nothing is there.
            on_bytes: Told how many bytes were read so far, to show progress or to raise.
        """
        if self._folder is None:
            return None
        kept, record = self._paths(self._folder, shard)
        try:
            found = TypeAdapter(KeptShard).validate_json(read_regular(record, largest=LARGEST_LIST), strict=True)
            if found.identity != _identity(shard) or kept.stat().st_size != shard.nbytes:
                return None
            path.hardlink_to(kept)  # first: what is read below is what the output has
        except (OSError, ValidationError):
            return None
        if _digest(path, on_bytes) == found.sha256:
            return found
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
    """Return the digest over everything the plan says about a shard's bytes.

    The inputs' content is not read for it: a kept folder belongs to one action, whose key has the digests of its inputs.
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

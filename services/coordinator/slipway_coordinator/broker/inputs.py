"""What tasks fetch of their inputs, and which nodes of an engine have it already."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping

from slipway.artifacts.manifest import Manifest
from slipway.division import PARTS, is_part
from slipway.errors import ModelExportError
from slipway.planning.references import AttemptKey
from slipway.registry import known_stage
from slipway_coordinator.broker.board import Board
from slipway_coordinator.lifecycle.offers import Offer

ReadManifest = Callable[[str], Manifest]
"""Reads the manifest of an artifact from the store; blocks."""

_MOST_SIZES = 10_000


def folder_bytes(offer: Offer, sizes: Mapping[str, int]) -> int:
    """Return the disk that an attempt's work folder takes: its inputs, and an output of about their size, of which a part makes its share.

    Args:
        offer: The attempt.
        sizes: Bytes that it fetches of each input by digest.
    """
    fetched, params = sum(sizes.values()), offer.call.params
    return fetched + fetched // (int(params[PARTS]) if is_part(params) else 1)


class Inputs:
    """Inputs of the attempts that one coordinator submits.

    Args:
        board: Knows which attempt made an artifact.
        manifests: Measures artifacts.
    """

    def __init__(self, board: Board, manifests: ReadManifest) -> None:
        self._board, self._manifests = board, manifests
        self._sizes: dict[tuple[str, tuple[str, ...]], int] = {}  # by digest and what is left out of it
        self._joined: dict[AttemptKey, tuple[str, ...]] = {}  # digests of the parts that an attempt joins

    async def measure(self, offer: Offer) -> dict[str, int]:
        """Return the bytes that an attempt fetches of each input by digest, for inputs that can be read.

        What it adopts without reading is not fetched: the weights of the parts that it joins.
        """
        stage = known_stage(offer.stage)
        left_out = () if stage is None else offer.call.step(stage).adopts
        digests = sorted(set(offer.call.inputs.values()))
        if left_out:
            self._joined[offer.key] = tuple(digests)
        while len(self._sizes) > _MOST_SIZES:
            del self._sizes[next(iter(self._sizes))]
        for digest in digests:
            if (digest, left_out) not in self._sizes:
                with contextlib.suppress(ModelExportError, OSError):  # the task itself will report it
                    manifest = await asyncio.to_thread(self._manifests, digest)
                    self._sizes[digest, left_out] = sum(file.size_bytes for file in manifest.without(left_out))
        return {digest: self._sizes[digest, left_out] for digest in digests if (digest, left_out) in self._sizes}

    def nodes_near(self, export: str, sizes: Mapping[str, int], nodes: Mapping[AttemptKey, str]) -> tuple[str, ...]:
        """Return the nodes that made a task's inputs, most bytes first.

        Args:
            export: Name of the export.
            sizes: Bytes of the inputs by digest.
            nodes: Where attempts ran.
        """
        bytes_at = Counter[str]()
        for digest, size in sizes.items():
            makers = self._makers(export, digest)
            for maker in makers:
                if maker in nodes:
                    bytes_at[nodes[maker]] += size // len(makers)
        return tuple(node for node, _ in bytes_at.most_common())

    def by_part(self, export: str, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of inputs by what workers have of them: the artifacts of the parts, if an input was joined."""
        split: dict[str, int] = {}
        for digest, size in sizes.items():
            parts = self._parts(export, digest)
            split |= {part: size // len(parts) for part in parts}
        return split

    def joins(self, key: AttemptKey) -> bool:
        """Return whether an attempt, which was measured, joins parts, and so does not fetch all of its inputs."""
        return key in self._joined

    def _makers(self, export: str, digest: str) -> list[AttemptKey]:
        """Return the attempts that made an artifact: those of the parts if it was joined, as the join's node never had the weights."""
        made_by = self._board.wanted[export].made_by
        return [made_by[part] for part in self._parts(export, digest) if part in made_by]

    def _parts(self, export: str, digest: str) -> tuple[str, ...]:
        """Return the parts that an artifact was joined from; itself if it was made in one piece."""
        wanted = self._board.wanted.get(export)
        maker = wanted.made_by.get(digest) if wanted is not None else None
        return self._joined.get(maker, (digest,)) if maker is not None else (digest,)

    def forget(self) -> None:
        """Forget the attempts of exports that have ended."""
        self._joined = {key: parts for key, parts in self._joined.items() if key.export in self._board.wanted}

"""Find the keys of ``rank_pattern`` and ``alpha_pattern`` for a module with the same result as peft, but faster.

peft matches every key against every module (``get_pattern_key`` of peft 0.21). An adapter of experts has tens of thousands of both,
and nearly all keys are plain names, which are looked up here.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

_SPECIAL = frozenset("*+?{}()[]|^$\\")


class PatternKeys:
    """Keys in the order in which peft tries them.

    In a plain name a dot matches any character, as in every expression. So plain names are indexed by length and positions of their
    dots, and a module is looked up with dots at these positions.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = tuple(keys)
        self._expressions: list[int] = []
        self._plain: dict[int, dict[tuple[int, ...], dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
        for place, key in enumerate(self._keys):
            if _SPECIAL.isdisjoint(key):
                dots = tuple(index for index, character in enumerate(key) if character == ".")
                self._plain[len(key)][dots][key] = place
            else:
                self._expressions.append(place)

    def first(self, module: str) -> str:
        """Return the first key that matches a module; the module's name if none does."""
        return next(self.matching(module), module)

    def matching(self, module: str) -> Iterator[str]:
        """Yield the keys that match a module, in their order."""
        if "\n" in module:  # a dot and the end of an expression treat it specially
            yield from (key for key in self._keys if _expression(key).match(module))
            return
        plain = sorted(self._plain_places(module))
        for place in heapq.merge(plain, self._expressions):
            key = self._keys[place]
            if _SPECIAL.isdisjoint(key) or _expression(key).match(module):
                yield key

    def _plain_places(self, module: str) -> Iterator[int]:
        starts = [0, *(index + 1 for index, character in enumerate(module) if character == ".")]
        for end in (module[start:] for start in starts):
            for dots, places in self._plain.get(len(end), {}).items():
                characters = list(end)
                for dot in dots:
                    characters[dot] = "."
                place = places.get("".join(characters))
                if place is not None:
                    yield place


@cache
def _expression(key: str) -> re.Pattern[str]:
    """Return a key as peft's expression; cached, because an adapter may have more keys than :mod:`re` caches."""
    return re.compile(rf"(.*\.)?({key})$")

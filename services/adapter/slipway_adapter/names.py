"""Find the module of the base that an adapter's module is, whatever prefixes the adapter was saved under."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from slipway.errors import AdapterExportError
from slipway.texts import quoted

Shape = tuple[int, ...]


class Modules:
    """Modules by their ends.

    Args:
        shapes: Shape of each module's weight, by the module's name in the model.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self._by_end: dict[str, list[str]] = defaultdict(list)
        for name in sorted(shapes):
            self._by_end[_end(name)].append(name)

    def find(self, name: str) -> str | None:
        """Return the module with this name, or the only one with the longest common end; None if there is none."""
        if name in self._shapes:
            return name
        parts = name.split(".")
        alike = sorted(((_alike(parts, other.split(".")), other) for other in self._by_end[_end(name)]), reverse=True)
        best = [other for score, other in alike if score == alike[0][0]]
        return best[0] if len(best) == 1 else None

    def find_all(self, names: Iterable[str]) -> dict[str, str]:
        """Return the module of each of an adapter's modules.

        Raises:
            AdapterExportError: ``ADAPTER_TENSOR_UNUSED`` if there is none, or two names lead to one.
        """
        found: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in names:
            module = self.find(name)
            if module is None or module in taken:
                what = (
                    f"belongs to the same module as {quoted(taken[module])}"
                    if module
                    else "belongs to no module of the base"
                )
                raise AdapterExportError(
                    f"the adapter's module {quoted(name)} {what}",
                    reason="ADAPTER_TENSOR_UNUSED",
                    remedy="use the base model that the adapter was trained on",
                    about={"module": name},
                )
            found[name] = taken[module] = module
            taken[module] = name
        return found


def _end(name: str) -> str:
    """Return the end of a name from its first layer number on; without one, its last part."""
    parts = name.split(".")
    return ".".join(parts[next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1) :])


def _alike(parts: list[str], others: list[str]) -> tuple[int, int]:
    """Return the number of equal parts at the end, and of all parts that both have."""
    equal = 0
    for part, other in zip(reversed(parts), reversed(others), strict=False):
        if part != other:
            break
        equal += 1
    return equal, len(set(parts) & set(others))

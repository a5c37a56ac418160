"""The places where outputs run, and what a format says about its fitness for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

Target = Literal["", "cpu-server", "nvidia", "apple", "android", "browser", "edge", "llama.cpp", "vllm"]
"""The name of a target; empty for none."""
TARGETS: Mapping[str, str] = {
    "cpu-server": "a server without a GPU",
    "nvidia": "a server with an NVIDIA GPU",
    "apple": "a Mac, iPhone or iPad",
    "android": "an Android phone or tablet",
    "browser": "a web page",
    "edge": "a small computer with little memory",
    "llama.cpp": "llama.cpp, Ollama, LM Studio",
    "vllm": "vLLM, or SGLang, which takes the same folders",
}
"""Targets by name, each with what it is."""
ALIASES: Mapping[str, str] = {"ollama": "llama.cpp"}
"""Other names of targets."""


def target_name(text: str) -> str:
    """Return a target's name as in :data:`TARGETS`, given in any case or by another name; any other text unchanged."""
    lowered = text.strip().lower()
    known = ALIASES.get(lowered, lowered)
    return known if known in TARGETS else text


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
class Fit:
    """What a format says about one target.

    Attributes:
        target: One of :data:`TARGETS`.
        why: A sentence: why it fits, and what limits it.
        levels: Levels that run well there, the usual one first; empty text is the unquantized output.
        variant: Variant that it is about instead of a level, for which ``settings`` ask; empty for none.
        families: Names of the model families that this is about (``slipway.model.families``); None: all that the format takes.
        rank: Place among the formats that fit, lowest first.
        settings: Further settings of the format's section that the target needs.
        source: Where the facts come from: a document or page.
    """

    target: str
    why: str
    levels: tuple[str, ...] = ("",)
    variant: str = ""
    families: tuple[str, ...] | None = None
    rank: int = 50
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse an unknown target.

        Raises:
            ValueError: The target is not known, or no level is named.
        """
        if self.target not in TARGETS:
            raise ValueError(f"{self.target!r} is no target; use one of {', '.join(TARGETS)}")
        if not self.levels:
            raise ValueError(f"its fit for {self.target} names no level")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the levels, or the variant alone."""
        return (self.variant,) if self.variant else self.levels

    def takes(self, family: str) -> bool:
        """Return whether it is about a family; an unknown one (empty) counts."""
        return not family or self.families is None or family in self.families

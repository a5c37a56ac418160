"""Tell a vocabulary in the manner of SentencePiece, where a space is a character of its own, from one of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.texts import quoted
from slipway.validation.texts import TextKind
from slipway_gguf.vocabulary.documents import unsupported
from slipway_gguf.vocabulary.tokens import SPACE


@dataclass(frozen=True, slots=True)
class Spaces:
    """How spaces are written.

    Attributes:
        prefix: Whether a space is put before a text.
        differs: Kinds of text that llama.cpp splits otherwise.
    """

    prefix: bool
    differs: tuple[TextKind, ...] = ()


def spaces_of(tokenizer: Mapping[str, Any]) -> Spaces | None:
    """Return how a tokenizer writes spaces as :data:`SPACE`; None for a tokenizer of bytes.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: it changes text in a way that llama.cpp does not.
    """
    pre = tokenizer.get("pre_tokenizer")
    steps = _steps(tokenizer.get("normalizer"), "normalizers")
    meta = pre if isinstance(pre, dict) and pre.get("type") == "Metaspace" else None
    replaced = any(step.get("type") == "Replace" and step.get("content") == SPACE for step in steps)
    if meta is None and not replaced:
        return None
    prepended = [step.get("prepend") for step in steps if step.get("type") == "Prepend"]
    if prepended not in ([], [SPACE]):
        raise unsupported(f"it writes {quoted(prepended)} before each text, and llama.cpp only a space")
    other = next((step for step in steps if step.get("type") != "Prepend" and not _replaces_spaces(step)), None)
    if other is not None:
        raise unsupported(f"it changes text before it splits ({quoted(other)}), which llama.cpp does not")
    if meta is None:
        _check_inert(pre)
        return Spaces(bool(prepended))
    if prepended:
        raise unsupported("it puts a space before each text twice (Prepend and Metaspace), and llama.cpp once")
    if meta.get("replacement", SPACE) != SPACE:
        raise unsupported(f"it writes a space as {quoted(meta.get('replacement'))}, and llama.cpp as {SPACE}")
    if meta.get("split", True):
        raise unsupported(
            "it splits text at spaces (Metaspace with split), which llama.cpp does not do with such vocabularies"
        )
    scheme = meta.get("prepend_scheme", "always" if meta.get("add_prefix_space", True) else "never")
    # This step puts no space before one that is there; llama.cpp always does, and behind special tokens too.
    behind = (TextKind.SPECIAL,) if scheme == "first" else ()
    return Spaces(scheme != "never", (TextKind.LEADING, TextKind.SPECIAL_SPACES, *behind) if scheme != "never" else ())


def _replaces_spaces(step: Mapping[str, Any]) -> bool:
    """Return whether a step of the normalizer writes a space as :data:`SPACE`, and changes nothing else."""
    return (step.get("type"), step.get("pattern"), step.get("content")) == ("Replace", {"String": " "}, SPACE)


def _check_inert(pre: Any) -> None:
    """Refuse a pre-tokenizer that splits; splitting at spaces does nothing, as there are none any more."""
    pattern = pre.get("pattern") if isinstance(pre, dict) else None
    if pre is not None and not (isinstance(pattern, dict) and pattern == {"String": " "}):
        raise unsupported(f"it splits text by {quoted(pre)}, which llama.cpp does not do with such vocabularies")


def _steps(found: Any, key: str) -> list[Mapping[str, Any]]:
    if isinstance(found, dict) and found.get("type") == "Sequence":
        listed = found.get(key)
        return [each for each in (listed if isinstance(listed, list) else []) if isinstance(each, dict)]
    return [found] if isinstance(found, dict) else []

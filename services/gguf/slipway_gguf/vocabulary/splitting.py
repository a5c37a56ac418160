"""Name how a tokenizer splits text before it merges: compare its own expressions with those that llama.cpp has under each name.

llama.cpp knows how to split only by name, ``tokenizer.ggml.pre``, and gives the wrong tokens without a word if the name is wrong. The
names and expressions are those of ``llama-vocab.cpp`` in b11549 (xllamacpp 2026.10.11549).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.texts import quoted, shortened
from slipway.validation.texts import TextKind
from slipway_gguf.vocabulary.documents import unsupported

_NESTED = 8
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SHORT_SPELT = (
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
    "('s|'S|'t|'T|'re|'RE|'Re|'rE|'ve|'VE|'Ve|'vE|'m|'M|'ll|'LL|'Ll|'lL|'d|'D)",
)
"""Other spellings of English endings in either case."""
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_REST}"
_QWEN2 = rf"{_SHORT}|{_WORDS}|\p{{N}}|{_SIGNS}|{_REST}"
_QWEN35 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END"
)
_TEKKEN = _CASED.replace("END", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST
_GPT4O = _CASED.replace("END", f"{_SHORT}?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _REST
)
APPROXIMATE = (TextKind.CASED, TextKind.MARKS, TextKind.DECOMPOSED)
"""Where llama.cpp's expression is another one than the tokenizer's, because its engine knows no classes such as ``\\p{Lu}``."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """A way to split that llama.cpp knows.

    Attributes:
        pre: Its name, if a word that is a token as a whole is merged like any other.
        whole: Its name, if such a word is that token without merging (``ignore_merges``); empty if llama.cpp has none.
        approximate: Kinds of text in which llama.cpp splits otherwise.
    """

    pre: str
    whole: str = ""
    approximate: tuple[TextKind, ...] = ()


KNOWN: Mapping[tuple[str, ...], Splitting] = {
    (_GPT2,): Splitting("gpt-2"),
    (r"\p{N}", _GPT2): Splitting("starcoder"),
    (_LLAMA3,): Splitting("dbrx", whole="llama-bpe"),
    (_QWEN2,): Splitting("qwen2"),
    (_QWEN35,): Splitting("qwen35"),
    (_TEKKEN,): Splitting("", whole="tekken", approximate=APPROXIMATE),
    (_GPT4O,): Splitting("gpt-4o", approximate=APPROXIMATE),
    (r"\p{N}{1,3}", _CJK, _DEEPSEEK): Splitting("deepseek-v3"),
    (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")): Splitting("", whole="minicpm5"),
    (r"[^\n]+|[\n]+", _QWEN2): Splitting("laguna"),
}
"""By expressions, as ``tokenizer.json`` has them, in the order in which each splits what those before it left."""


def splitting_of(pre_tokenizer: Any, *, whole: bool) -> tuple[str, tuple[TextKind, ...]]:
    """Return llama.cpp's name of the way a byte-level tokenizer splits, and the kinds of text in which llama.cpp splits otherwise.

    Args:
        pre_tokenizer: The part ``pre_tokenizer`` of ``tokenizer.json``.
        whole: Whether a word that is a token is not merged.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: llama.cpp knows no such way.
    """
    expressions = tuple(map(_canonical, _expressions(pre_tokenizer)))
    found = KNOWN.get(expressions)
    if found is not None:
        name = found.whole if whole else found.pre
        if name:
            return name, found.approximate
        other = found.pre or found.whole
        merged = "without merging words that are tokens" if whole else "by merging words that are tokens too"
        raise unsupported(f"llama.cpp splits as this tokenizer does only as {other!r}, and never {merged}")
    raise unsupported(
        f"llama.cpp has no name for how this tokenizer splits text, {shortened(' then '.join(expressions), 400)}; the nearest that it "
        f"has is {_nearest(expressions)}"
    )


def _nearest(expressions: tuple[str, ...]) -> str:
    """Describe the way that looks most alike."""
    text = " then ".join(expressions)
    known = {" then ".join(each): splitting for each, splitting in KNOWN.items()}
    near = max(known, key=lambda each: difflib.SequenceMatcher(None, text[:600], each, autojunk=False).ratio())
    return f"{(known[near].pre or known[near].whole)!r}, {near}"


def _canonical(expression: str) -> str:
    for spelt in _SHORT_SPELT:
        expression = expression.replace(spelt, _SHORT)
    return expression.replace("\\u3040", "\u3040")


def _expressions(found: Any, depth: int = 0) -> list[str]:
    """Return the expressions of a pre-tokenizer, without the step that writes bytes as characters."""
    if not isinstance(found, dict) or depth > _NESTED:
        raise unsupported(f"its pre-tokenizer is {quoted(found)}, which splits nothing that llama.cpp knows")
    kind = found.get("type")
    match kind:
        case "Sequence":
            steps = found.get("pretokenizers")
            return [
                each for step in (steps if isinstance(steps, list) else []) for each in _expressions(step, depth + 1)
            ]
        case "ByteLevel":
            if found.get("add_prefix_space"):
                raise unsupported(
                    "it writes a space before each text (add_prefix_space), which llama.cpp does not do here"
                )
            return [_GPT2] if found.get("use_regex", True) else []
        case "Digits":
            return [r"\p{N}" if found.get("individual_digits") else r"\p{N}+"]
        case "Split":
            return [_split(found)]
    raise unsupported(f"llama.cpp has no pre-tokenizer like {quoted(kind)}; it splits by expressions only")


def _split(found: Mapping[str, Any]) -> str:
    pattern = found.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    # Each match is a part, and so is what lies between: "Removed" with "invert" says the same where everything matches.
    same = (found.get("behavior"), bool(found.get("invert"))) in {("Isolated", False), ("Removed", True)}
    if not isinstance(expression, str) or not same:
        raise unsupported(
            f"its pre-tokenizer splits by {quoted(pattern)} ({quoted(found.get('behavior'))}), which llama.cpp cannot"
        )
    return expression

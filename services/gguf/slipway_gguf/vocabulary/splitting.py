"""Find llama.cpp's name for how a tokenizer splits text before it merges, by comparing regular expressions.

A GGUF file names the way to split in ``tokenizer.ggml.pre``. With a wrong name llama.cpp silently gives wrong tokens. The names and
expressions are those of ``llama-vocab.cpp`` in b11549 (xllamacpp 2026.10.11549).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.texts import quoted, shortened
from slipway.validation.texts import TextKind
from slipway_gguf.vocabulary.documents import unsupported_error

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
_LETTERS = (
    "A-Za-z"
    "\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters that have a case, as DeepSeek's first tokenizers list them."""
_HAN = "[一-龥\u0800-一가-\ud7ff]+"
_SEED = rf"{_SHORT}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_REST}"
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
"""What tokenizers calls punctuation: Unicode's, and all signs of ASCII."""
APPROXIMATE = (TextKind.CASED, TextKind.MARKS, TextKind.DECOMPOSED)
"""Kinds of text that llama.cpp splits differently, because its engine of expressions has no classes such as ``\\p{Lu}``."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """A way to split that llama.cpp knows.

    Attributes:
        pre: Its name if words that are tokens are merged like any other; empty if llama.cpp has none.
        whole: Its name if such words become their token without merging (``ignore_merges``); empty if llama.cpp has none.
        approximate: Kinds of text that llama.cpp splits differently.
        approximate_whole: The same for the second name, if it has another expression in llama.cpp than the first.
    """

    pre: str
    whole: str = ""
    approximate: tuple[TextKind, ...] = ()
    approximate_whole: tuple[TextKind, ...] | None = None


KNOWN: Mapping[tuple[str, ...], Splitting] = {
    (_GPT2,): Splitting("gpt-2"),
    (r"\p{N}", _GPT2): Splitting("starcoder"),
    (_LLAMA3,): Splitting("dbrx", whole="llama-bpe"),
    (_QWEN2,): Splitting("qwen2"),
    (_QWEN35,): Splitting("qwen35"),
    (_TEKKEN,): Splitting("", whole="tekken", approximate=APPROXIMATE),
    (_GPT4O,): Splitting(
        "gpt-4o",
        whole="granite-embed-multi-97m",
        approximate=APPROXIMATE,
        approximate_whole=(TextKind.CASED,),
    ),
    (r"\p{N}{1,3}", _CJK, _DEEPSEEK): Splitting("deepseek-v3"),
    (
        "[\r\n]",
        rf"\s?[{_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN,
        r"\p{N}",
    ): Splitting("deepseek-llm"),
    ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"): Splitting("deepseek-coder"),
    (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")): Splitting("", whole="minicpm5"),
    (r"[^\n]+|[\n]+", _QWEN2): Splitting("laguna"),
    (_SEED,): Splitting("seed-coder"),
    (_BLOOM,): Splitting("bloom"),
    (_PUNCTUATION, _GPT2, "[0-9]+", "[0-9][0-9][0-9]"): Splitting("falcon"),
}
"""Ways to split by their expressions in ``tokenizer.json``, in order: each expression splits the parts that the one before it left."""


def splitting_of(pre_tokenizer: Any, *, whole: bool) -> tuple[str, tuple[TextKind, ...]]:
    """Return llama.cpp's name for how a byte-level tokenizer splits, and the kinds of text that llama.cpp splits differently.

    Args:
        pre_tokenizer: The part ``pre_tokenizer`` of ``tokenizer.json``.
        whole: Whether words that are tokens are not merged.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: llama.cpp knows no such way.
    """
    expressions = tuple(map(_canonicalize, _expressions(pre_tokenizer)))
    splitting = KNOWN.get(expressions)
    if splitting is not None:
        name, kinds = (splitting.whole, splitting.approximate_whole) if whole else (splitting.pre, None)
        if name:
            return name, splitting.approximate if kinds is None else kinds
        other = splitting.pre or splitting.whole
        merged = "without merging words that are tokens" if whole else "by merging words that are tokens too"
        raise unsupported_error(f"llama.cpp splits as this tokenizer does only as {other!r}, and never {merged}")
    raise unsupported_error(
        f"llama.cpp has no name for how this tokenizer splits text, {shortened(' then '.join(expressions), 400)}; the nearest that it "
        f"has is {_describe_nearest(expressions)}"
    )


def _describe_nearest(expressions: tuple[str, ...]) -> str:
    """Describe the known way with the most similar expressions."""
    text = " then ".join(expressions)
    known = {" then ".join(each): splitting for each, splitting in KNOWN.items()}
    near = max(known, key=lambda each: difflib.SequenceMatcher(None, text[:600], each, autojunk=False).ratio())
    return f"{(known[near].pre or known[near].whole)!r}, {near}"


def _canonicalize(expression: str) -> str:
    for spelt in _SHORT_SPELT:
        expression = expression.replace(spelt, _SHORT)
    return expression.replace("\\u3040", "\u3040")


def _expressions(pre_tokenizer: Any, depth: int = 0, *, of_bytes: bool = False) -> list[str]:
    """Return the expressions of a pre-tokenizer, without the step that writes bytes as characters."""
    if not isinstance(pre_tokenizer, dict) or depth > _NESTED:
        raise unsupported_error(
            f"its pre-tokenizer is {quoted(pre_tokenizer)}, which splits nothing that llama.cpp knows"
        )
    kind = pre_tokenizer.get("type")
    match kind:
        case "Sequence":
            steps = pre_tokenizer.get("pretokenizers")
            listed = steps if isinstance(steps, list) else []
            kinds = [step.get("type") if isinstance(step, dict) else None for step in listed]
            return [
                each
                for index, step in enumerate(listed)
                for each in _expressions(step, depth + 1, of_bytes="ByteLevel" in kinds[:index])
            ]
        case "ByteLevel":
            if pre_tokenizer.get("add_prefix_space"):
                raise unsupported_error(
                    "it writes a space before each text (add_prefix_space), which llama.cpp does not do here"
                )
            return [_GPT2] if pre_tokenizer.get("use_regex", True) else []
        case "Digits":
            # Of text whose bytes are written as characters only ASCII's digits are still digits.
            digit = "[0-9]" if of_bytes else r"\p{N}"
            return [digit if pre_tokenizer.get("individual_digits") else f"{digit}+"]
        case "Punctuation" if pre_tokenizer.get("behavior") == "Contiguous":
            return [_PUNCTUATION]
        case "Split":
            return [_split_expression(pre_tokenizer)]
    raise unsupported_error(f"llama.cpp has no pre-tokenizer like {quoted(kind)}; it splits by expressions only")


def _split_expression(pre_tokenizer: Mapping[str, Any]) -> str:
    pattern = pre_tokenizer.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    # Each match is a part, and so is the text between matches. "Removed" with "invert" means the same if all text matches.
    same = (pre_tokenizer.get("behavior"), bool(pre_tokenizer.get("invert"))) in {
        ("Isolated", False),
        ("Removed", True),
    }
    if not isinstance(expression, str) or not same:
        raise unsupported_error(
            f"its pre-tokenizer splits by {quoted(pattern)} ({quoted(pre_tokenizer.get('behavior'))}), which llama.cpp cannot"
        )
    return expression

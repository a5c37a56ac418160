"""Say how tokens are merged: as pairs in order, or as scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from slipway.texts import quoted
from slipway_gguf.vocabulary.documents import MOST_TOKENS, TokenizerFiles, unsupported
from slipway_gguf.vocabulary.tokens import TokenList

_MOST_MERGES = 4 * MOST_TOKENS


def pairs_of(files: TokenizerFiles) -> list[tuple[str, str]]:
    """Return the merges, first the one that goes first.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: a merge is none, or makes no token.
    """
    merges = files.model.get("merges")
    if not isinstance(merges, list) or len(merges) > _MOST_MERGES:
        raise unsupported(f"the tokenizer has no list of at most {_MOST_MERGES} merges")
    pairs = [_pair(each) for each in merges]
    wrong = next((pair for pair in pairs if not _known(pair, files)), None)
    if wrong is not None:
        raise unsupported(f"the merge {quoted(' '.join(wrong))} has parts, or makes a text, that are no tokens")
    return pairs


def merge_texts(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield each merge as a GGUF file holds it; llama.cpp parts the two at the first space behind the first character."""
    for left, right in pairs:
        if " " in left[1:] or " " in right:
            raise unsupported(
                f"the merge of {quoted(left)} and {quoted(right)} has a space, which a GGUF file cannot hold"
            )
        yield f"{left} {right}"


def scores_of(pairs: Iterable[tuple[str, str]], tokens: TokenList) -> tuple[float, ...]:
    """Return a score per token: llama.cpp merges the two neighbours whose token has the highest.

    A token is as good as the first of the merges that make it. One that no merge makes goes last.
    """
    order: dict[str, int] = {}
    for left, right in pairs:
        order.setdefault(left + right, len(order))
    return tuple(-float(order.get(text, len(order))) for text in tokens.texts)


def _pair(merge: Any) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    match parts:
        case [str(left), str(right)] if left and right:
            return left, right
    raise unsupported(f"the tokenizer has {quoted(merge)} among its merges")


def _known(pair: tuple[str, str], files: TokenizerFiles) -> bool:
    return all(text in files.vocabulary for text in (*pair, "".join(pair)))

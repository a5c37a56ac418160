"""Choose the text of a calibration: read, render, compare it with the held-out text, draw by a seed, and describe it.

The built-in text is English and code that come with Python, none of which is in the built-in held-out text.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from slipway.documents import heldout
from slipway.documents.heldout import BUILT_IN_TOPICS, documentation
from slipway.documents.reader import Document, Purpose, invalid_text_error, read_documents
from slipway.documents.rendering import Renderer, passages
from slipway.documents.separation import FEWEST_TOKENS, MOST_NAMED, separate, too_little_left_error
from slipway.stage import Context
from slipway.texts import counted
from slipway_quantize.calibration_data.params import TEXTS, CalibrationDataParams
from slipway_quantize.report import write_json

MODULES = (
    "ast",
    "calendar",
    "collections",
    "dataclasses",
    "datetime",
    "difflib",
    "email.message",
    "enum",
    "fractions",
    "functools",
    "http.client",
    "inspect",
    "ipaddress",
    "logging",
    "mailbox",
    "optparse",
    "pathlib",
    "random",
    "shutil",
    "smtplib",
    "statistics",
    "subprocess",
    "tarfile",
    "threading",
    "typing",
    "urllib.parse",
)
"""Modules of the standard library that are not in the built-in held-out text."""

_MOST_SCRIPTS = 8


def choose_text(inputs: Mapping[str, Path], target: Path, params: CalibrationDataParams, ctx: Context) -> None:
    """Write ``calibration.jsonl``, one passage a line in random order, and ``profile.json`` into the empty folder ``target``.

    Raises:
        QuantizationError: ``CALIBRATION_DATA_INVALID`` or ``CALIBRATION_OVERLAP``.
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the held-out text cannot be read.
    """
    tokenizer = _load_tokenizer(inputs["model"])
    named = "calibration" in inputs
    documents = read_documents(inputs["calibration"], Purpose.CALIBRATION) if named else built_in_documents()
    ctx.progress("read", done=0)
    with Renderer(tokenizer, Purpose.CALIBRATION) as renderer:
        texts: Mapping[str, str] = passages(documents, renderer)
    compared: dict[str, Any] = {}
    if params.overlap != "ignore":
        ctx.progress("compare with the held-out text", done=0)
        texts, compared = _compare_with_held_out(texts, inputs, tokenizer, ctx)
    chosen, tokens = _draw_texts(list(texts), tokenizer, params)
    if sum(map(len, tokens)) < FEWEST_TOKENS:
        if compared.get("passages_left_out"):
            raise too_little_left_error(compared["passages_left_out"], counted(sum(map(len, tokens)), "token"))
        raise invalid_text_error(
            Purpose.CALIBRATION,
            f"{counted(sum(map(len, tokens)), 'token')} can be used, and at least {FEWEST_TOKENS:,} are needed",
            "give more of the training data; a few hundred documents are enough",
        )
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in chosen).encode()
    (target / TEXTS).write_bytes(lines)
    described = {
        "schema_version": 1,
        "source": _source(params) if named else "built-in text (Python's documentation and standard library)",
        **profile(chosen, tokens, vocabulary=len(tokenizer)),
        "passages_found": len(texts),
        **({"heldout": compared} if compared else {}),
        "seed": params.seed,
        "sha256": hashlib.sha256(lines).hexdigest(),
    }
    write_json(target / "profile.json", described)
    ctx.record(profile=described)


def _source(params: CalibrationDataParams) -> str:
    return "the sample of its training data that the run brings" if params.source == "run" else "the given text"


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizer's own code may raise anything
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        remedy = "give the tokenizer's files beside the base model or the adapter, or set optimization.method to rtn"
        raise invalid_text_error(
            Purpose.CALIBRATION, f"the model's tokenizer cannot be loaded ({first})", remedy
        ) from error


def _compare_with_held_out(
    texts: Mapping[str, str], inputs: Mapping[str, Path], tokenizer: Any, ctx: Context
) -> tuple[Mapping[str, str], dict[str, Any]]:
    """Compare the passages with the held-out text; return those to use, and facts about the overlap."""
    text = heldout.read_held_out(inputs["heldout"]) if "heldout" in inputs else heldout.built_in_text()
    parted = separate(texts, heldout.render(text.documents, tokenizer))
    if parted.left_out and "calibration" in inputs:
        ctx.warn(parted.warning())
    compared = {
        "source": text.source,
        "overlap": round(parted.overlap, 6),
        "passages_left_out": parted.left_out,
        "documents_left_out": list(parted.documents[:MOST_NAMED]),
    }
    return parted.kept, compared


def _draw_texts(
    texts: Sequence[str], tokenizer: Any, params: CalibrationDataParams
) -> tuple[list[str], list[list[int]]]:
    """Draw passages by the seed until there are enough tokens; return the passages with their tokens."""
    chosen: list[str] = []
    tokens: list[list[int]] = []
    room = params.tokens
    for place in np.random.default_rng(params.seed).permutation(len(texts)):
        if room <= 0:
            break
        passage = texts[place]
        ids = list(tokenizer(passage, add_special_tokens=False, verbose=False)["input_ids"])
        if ids:
            chosen.append(passage)
            tokens.append(ids)
            room -= len(ids)
    return chosen, tokens


def built_in_documents() -> Iterator[Document]:
    """Yield Python's documentation by topic, and sources of its standard library: the same for a given Python."""
    for topic, text in sorted(documentation().items()):
        if topic not in BUILT_IN_TOPICS:
            yield Document(f"pydoc_data.topics[{topic!r}]", text=text)
    for module in MODULES:
        spec = find_spec(module)
        if spec is not None and spec.origin and Path(spec.origin).is_file():
            yield Document(module, text=Path(spec.origin).read_text(encoding="utf-8"))


def profile(passages: Sequence[str], tokens: Sequence[Sequence[int]], *, vocabulary: int) -> dict[str, Any]:
    """Return figures of the passages and their tokens, as JSON-ready data."""
    lengths = sorted(map(len, tokens))
    seen = {token for each in tokens for token in each}
    return {
        "passages": len(passages),
        "tokens": sum(lengths),
        "characters": sum(map(len, passages)),
        "passage_tokens": {"shortest": lengths[0], "median": median(lengths), "longest": lengths[-1]},
        "scripts": scripts(passages),
        "vocabulary": {"size": vocabulary, "seen": len(seen), "coverage": round(len(seen) / max(vocabulary, 1), 6)},
    }


def scripts(passages: Sequence[str]) -> dict[str, float]:
    """Return the share of letters in each script, such as LATIN, CYRILLIC or CJK, the most frequent first."""
    letters: Counter[str] = Counter()
    for passage in passages:
        letters.update(passage)
    counts: Counter[str] = Counter()
    for letter, count in letters.items():
        if letter.isalpha():
            counts[unicodedata.name(letter, "UNKNOWN").split()[0]] += count
    total = max(counts.total(), 1)
    ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return {name: round(count / total, 4) for name, count in ordered[:_MOST_SCRIPTS]}

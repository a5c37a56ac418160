"""Choose the text of a calibration: read, rendered, compared with the held-out text, drawn by a seed, and described."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipway.counts import counted
from slipway.errors import QuantizationError
from slipway.stage import Context
from slipway.validation import heldout
from slipway_quantize.calibration_data.built_in import built_in_documents
from slipway_quantize.calibration_data.documents import invalid, read_documents
from slipway_quantize.calibration_data.overlap import frame, share_found, shingles, without
from slipway_quantize.calibration_data.params import TEXTS, CalibrationDataParams
from slipway_quantize.calibration_data.passages import passages
from slipway_quantize.calibration_data.profile import profile
from slipway_quantize.companions import write_json

MOST_OVERLAP = 0.01
"""Share of the held-out text that the text for calibration may have: phrases such as a license are in many texts."""
_MOST_OF_PASSAGE = 0.02
_FEWEST_TOKENS = 1024


def choose_text(inputs: Mapping[str, Path], target: Path, params: CalibrationDataParams, ctx: Context) -> None:
    """Write ``calibration.jsonl``, one passage a line in random order, and ``profile.json`` into the empty folder ``target``.

    Raises:
        QuantizationError: ``CALIBRATION_DATA_INVALID`` or ``CALIBRATION_OVERLAP``.
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the held-out text cannot be read.
    """
    tokenizer = _tokenizer(inputs["model"])
    named = "calibration" in inputs
    documents = read_documents(inputs["calibration"]) if named else built_in_documents()
    ctx.progress("read", done=0)
    found = list(dict.fromkeys(passages(documents, tokenizer)))  # each passage once
    compared: dict[str, Any] = {}
    if params.overlap != "ignore":
        ctx.progress("compare with the held-out text", done=0)
        found, compared = _compared(found, inputs, refuse=params.overlap == "refuse", ctx=ctx)
    chosen, tokens = _drawn(found, tokenizer, params)
    if sum(map(len, tokens)) < _FEWEST_TOKENS:
        raise invalid(
            f"{counted(sum(map(len, tokens)), 'token')} can be used, and at least {_FEWEST_TOKENS:,} are needed",
            "give more of the training data; a few hundred documents are enough",
        )
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in chosen).encode()
    (target / TEXTS).write_bytes(lines)
    described = {
        "schema_version": 1,
        "source": _source(params) if named else "built-in text (Python's documentation and standard library)",
        **profile(chosen, tokens, vocabulary=len(tokenizer)),
        "passages_found": len(found),
        **({"heldout": compared} if compared else {}),
        "seed": params.seed,
        "sha256": hashlib.sha256(lines).hexdigest(),
    }
    write_json(target / "profile.json", described)
    ctx.record(profile=described)


def _source(params: CalibrationDataParams) -> str:
    return "the sample of its training data that the run brings" if params.source == "run" else "the given text"


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizer's own code may raise anything
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        remedy = "give the tokenizer's files beside the base model or the adapter, or set optimization.method to rtn"
        raise invalid(f"the model's tokenizer cannot be loaded ({first})", remedy) from error


def _compared(
    found: list[str], inputs: Mapping[str, Path], *, refuse: bool, ctx: Context
) -> tuple[list[str], dict[str, Any]]:
    """Compare the passages with the held-out text; return those to use, and what was found."""
    text = heldout.held_out(inputs["heldout"]) if "heldout" in inputs else heldout.built_in()
    every = [shingles(passage) for passage in found]
    common = frame(every)
    held_out = without(shingles(text.text), common)
    every = [without(each, common) for each in every]
    overlap = _overlap(held_out, every)
    if refuse and overlap > MOST_OVERLAP:
        raise QuantizationError(
            f"the text for calibration holds {overlap:.1%} of the held-out text, and {MOST_OVERLAP:.0%} is allowed: "
            "a level that was fitted to the held-out text proves nothing on it",
            reason="CALIBRATION_OVERLAP",
            remedy="take the held-out documents out of the text for calibration, or hold other text out",
            about={"overlap": f"{overlap:.4f}"},
        )
    kept = [place for place, each in enumerate(every) if refuse or share_found(each, held_out) <= _MOST_OF_PASSAGE]
    left_out = len(found) - len(kept)
    if left_out and "calibration" in inputs:
        ctx.warn(
            f"{left_out} of {counted(len(found), 'passage')} of the training data's sample are in the held-out text too, "
            "and were left out; text that the model was trained on does not show how it does on new text"
        )
    compared = {
        "source": text.source,
        "overlap": round(_overlap(held_out, [every[place] for place in kept]), 6),
        "passages_left_out": left_out,
    }
    return [found[place] for place in kept], compared


def _overlap(held_out: Any, every: Sequence[Any]) -> float:
    return share_found(held_out, np.unique(np.concatenate(every))) if every else 0.0


def _drawn(found: Sequence[str], tokenizer: Any, params: CalibrationDataParams) -> tuple[list[str], list[list[int]]]:
    """Draw passages by the seed until they have the tokens; return them with their tokens."""
    chosen: list[str] = []
    tokens: list[list[int]] = []
    room = params.tokens
    for place in np.random.default_rng(params.seed).permutation(len(found)):
        if room <= 0:
            break
        passage = found[place]
        ids = list(tokenizer(passage, add_special_tokens=False, verbose=False)["input_ids"])
        if ids:
            chosen.append(passage)
            tokens.append(ids)
            room -= len(ids)
    return chosen, tokens

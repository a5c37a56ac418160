"""Choose the text of a calibration: read, rendered, compared with the held-out text, drawn by a seed, and described."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipway.counts import counted
from slipway.documents import heldout
from slipway.documents.passages import passages
from slipway.documents.purposes import Purpose, invalid
from slipway.documents.reading import read_documents
from slipway.documents.rendering import Renderer
from slipway.documents.separation import FEWEST_TOKENS, MOST_NAMED, separate, too_little_left
from slipway.stage import Context
from slipway_quantize.calibration_data.built_in import built_in_documents
from slipway_quantize.calibration_data.params import TEXTS, CalibrationDataParams
from slipway_quantize.calibration_data.profile import profile
from slipway_quantize.companions import write_json


def choose_text(inputs: Mapping[str, Path], target: Path, params: CalibrationDataParams, ctx: Context) -> None:
    """Write ``calibration.jsonl``, one passage a line in random order, and ``profile.json`` into the empty folder ``target``.

    Raises:
        QuantizationError: ``CALIBRATION_DATA_INVALID`` or ``CALIBRATION_OVERLAP``.
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the held-out text cannot be read.
    """
    tokenizer = _tokenizer(inputs["model"])
    named = "calibration" in inputs
    documents = read_documents(inputs["calibration"], Purpose.CALIBRATION) if named else built_in_documents()
    ctx.progress("read", done=0)
    with Renderer(tokenizer, Purpose.CALIBRATION) as renderer:
        found: Mapping[str, str] = passages(documents, renderer)
    compared: dict[str, Any] = {}
    if params.overlap != "ignore":
        ctx.progress("compare with the held-out text", done=0)
        found, compared = _compared(found, inputs, tokenizer, ctx)
    chosen, tokens = _drawn(list(found), tokenizer, params)
    if sum(map(len, tokens)) < FEWEST_TOKENS:
        if compared.get("passages_left_out"):
            raise too_little_left(compared["passages_left_out"], counted(sum(map(len, tokens)), "token"))
        raise invalid(
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
        raise invalid(Purpose.CALIBRATION, f"the model's tokenizer cannot be loaded ({first})", remedy) from error


def _compared(
    found: Mapping[str, str], inputs: Mapping[str, Path], tokenizer: Any, ctx: Context
) -> tuple[Mapping[str, str], dict[str, Any]]:
    """Compare the passages with the held-out text; return those to use, and what was found."""
    text = heldout.held_out(inputs["heldout"]) if "heldout" in inputs else heldout.built_in()
    parted = separate(found, heldout.rendered(text.documents, tokenizer))
    if parted.left_out and "calibration" in inputs:
        ctx.warn(parted.warning())
    compared = {
        "source": text.source,
        "overlap": round(parted.overlap, 6),
        "passages_left_out": parted.left_out,
        "documents_left_out": list(parted.documents[:MOST_NAMED]),
    }
    return parted.kept, compared


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

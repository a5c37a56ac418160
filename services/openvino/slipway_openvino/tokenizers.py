"""Convert the tokenizer for openvino-genai, and compare it with transformers' on texts that tokenizers get wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.models.model_files import tokenizer_files
from slipway.stage import Context
from slipway_openvino.library import ov

TOKENIZER, DETOKENIZER = "openvino_tokenizer.xml", "openvino_detokenizer.xml"

HARD_TEXTS: Mapping[str, str] = {
    "plain": "The quick brown fox jumps over the lazy dog.",
    "code": "def f(x: int) -> str:\n    return f'{x!r:>10}'  # 2**10 != 1_024\n",
    "digits": "1234567890 3.14159 1,000,000 0x7fff 2026-11-23T02:47:53Z ½ ²",
    "scripts": "漢字とかな、한국어, Ελληνικά, кириллица, العربية, हिन्दी, ไทย",
    "accents": "naïve café, Straße, A\u030angstro\u0308m, ﬁ ligature, İstanbul",
    "emoji": "👩‍👩‍👧‍👦 🇺🇳 👍🏽 ❤️ 🤷🏿‍♀️",
    "spaces": "  two  spaces\tand\t\ttabs \n\n\n  new lines \r\n end   ",
    "unusual spaces": "no\u00a0break, zero\u200bwidth, thin\u2009space, ideographic\u3000space",
    "contractions": "I'm, you'LL, it's; we'd've 'tis DON'T",
    "punctuation": "(a[b]{c}) <d/> -- … «e» “f” !!??;;:: @#$%^&*_+=~`|\\",
    "empty": "",
}
"""Texts by what is hard about them."""


def write_tokenizer(folder: Path, ctx: Context) -> dict[str, Any]:
    """Write the tokenizer of ``folder`` as two models beside it; return what is to be known about them.

    A tokenizer that cannot be converted, or that gives other tokens then, is a warning: the model itself does not depend on it.
    """
    if not tokenizer_files(folder):
        return {"converted": False, "why": "the model has no tokenizer"}
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        for name, model in zip(
            (TOKENIZER, DETOKENIZER), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True
        ):
            ov.save_model(model, folder / name, compress_to_fp16=False)
        differing = compare(folder, tokenizer)
    except Exception as error:  # noqa: BLE001 - neither library says what it raises for a tokenizer that it does not know
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        for name in (TOKENIZER, DETOKENIZER):
            for file in ((folder / name), (folder / name).with_suffix(".bin")):
                file.unlink(missing_ok=True)
        ctx.warn(f"openvino-tokenizers cannot convert this tokenizer, so openvino-genai cannot run the folder: {why}")
        return {"converted": False, "why": why}
    for what, found in differing.items():
        ctx.warn(
            f"openvino-tokenizers {what} otherwise than transformers: {', '.join(found)} "
            f"({len(found)} of {len(HARD_TEXTS)} hard texts); tokenize with transformers where such text matters"
        )
    return {"converted": True, "differing": differing, "compared": len(HARD_TEXTS)}


def compare(folder: Path, tokenizer: Any) -> dict[str, list[str]]:
    """Return the hard texts that the converted tokenizer splits or joins otherwise than transformers' tokenizer."""
    import openvino_tokenizers  # noqa: F401 - registers the operators of these models

    core = ov.Core()
    encode, decode = (core.compile_model(folder / name, "CPU") for name in (TOKENIZER, DETOKENIZER))
    found: dict[str, list[str]] = {}
    for name, text in HARD_TEXTS.items():
        wanted = tokenizer(text)["input_ids"]
        if encode([text])["input_ids"][0].tolist() != wanted:
            found.setdefault("splits text", []).append(name)
        if wanted and decode([wanted])[0][0] != tokenizer.decode(wanted, skip_special_tokens=True):
            found.setdefault("joins tokens", []).append(name)
    return found

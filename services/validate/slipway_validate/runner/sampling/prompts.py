"""Turn one prompt into tokens, by the model's own tokenizer and chat template, as test inputs are."""

from __future__ import annotations

from typing import Any

from slipway.model.families import DECODER
from slipway.model.folder import ModelFolder
from slipway_validate.cases import find_family
from slipway_validate.protocol.inputs import INPUTS_FILE, PromptSpec
from slipway_validate.runner.sampling.encoding import encode_records
from slipway_validate.runner.sampling.making import trained_tokenizer

_TOKENIZER = "tokenizer.json"


def encode_prompt(spec: PromptSpec) -> None:
    """Write the prompt's tokens, and the tokenizer as one file, whichever files it was loaded from.

    Raises:
        Unusable: There is no tokenizer that transformers can load, or the prompt does not fit into the model.
    """
    tokenizer, family = trained_tokenizer(spec.tokenizer, spec.model), find_family(spec.family)
    record: dict[str, Any] = {"source": spec.prompt, "max_new_tokens": spec.most}
    if family is DECODER:
        record = {"prompt": spec.prompt, "chat": spec.chat, "max_new_tokens": spec.most}
    encoded = encode_records(tokenizer, [record], family, ModelFolder.open(spec.model), called="the prompt")
    spec.samples.mkdir()
    (spec.samples / INPUTS_FILE).write_text(encoded.model_dump_json(), encoding="utf-8")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.save(str(spec.samples / _TOKENIZER))

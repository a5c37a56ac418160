"""Convert the tokenizer for openvino-genai, and compare it with transformers' on difficult texts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipway.model.chat_templates import ChatTemplates, EndlessTemplateError, TemplateError
from slipway.model.model_files import tokenizer_files
from slipway.stage import Context
from slipway.texts import one_line, shortened
from slipway.validation.texts import CONVERSATIONS, TEXTS, TextKind
from slipway_openvino.graphs.passes import number_nodes
from slipway_openvino.library import ov

TOKENIZER, DETOKENIZER = "openvino_tokenizer.xml", "openvino_detokenizer.xml"
COMPARED = sum(map(len, TEXTS.values()))
_LONGEST_MESSAGE = 300
_INSTALLED = ("sentencepiece_version", "tiktoken_version")
"""Keys under which openvino-tokenizers records installed packages, used or not. With them, a model's bytes would depend on the machine."""
_KNOWN = TextKind.CASED.value
"""Kind of text in which a difference is accepted: only the sigma at the end of a word is lower-cased otherwise."""


def write_tokenizer(folder: Path, ctx: Context) -> dict[str, Any]:
    """Write the tokenizer of ``folder`` as two models in the same folder; return facts about them.

    The run, not the facts, records whether prompts were compared: that depends on openvino-genai, which no extra installs, not on the model.
    A tokenizer that cannot be converted, or that differs once converted, is not delivered: the model does not depend on it.
    """
    if not tokenizer_files(folder):
        return {"converted": False, "why": "the model has no tokenizer"}
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    differing: dict[str, list[str]] = {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        for name, model in zip(
            (TOKENIZER, DETOKENIZER), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True
        ):
            number_nodes(model)
            for key in filter(model.has_rt_info, _INSTALLED):
                del model.rt_info[key]
            ov.save_model(model, folder / name, compress_to_fp16=False)
        differing = compare(folder, tokenizer)
        why = "; ".join(
            f"it {what} otherwise than transformers: {', '.join(kinds)}" for what, kinds in differing.items()
        )
    except Exception as error:  # noqa: BLE001 - neither library documents its errors for unknown tokenizers
        differing, why = {}, shortened(one_line(f"{type(error).__name__}: {error}"), _LONGEST_MESSAGE)
    facts = {"differing": differing} if differing else {}
    if {kind for kinds in differing.values() for kind in kinds} == {_KNOWN}:
        ctx.warn(
            f"openvino-tokenizers give a few {_KNOWN} other tokens than transformers, such as the last letter of a Greek word"
        )
        why = ""
    if not why:
        ctx.record(prompts_compared=_can_render(tokenizer))
        return {"converted": True, "compared": COMPARED, **facts}
    for name in (TOKENIZER, DETOKENIZER):
        for file in ((folder / name), (folder / name).with_suffix(".bin")):
            file.unlink(missing_ok=True)
    ctx.warn(
        "openvino-tokenizers cannot convert this tokenizer, so openvino-genai cannot run the folder; tokenize with transformers, "
        f"and give OpenVINO the tokens: {why}"
    )
    return {"converted": False, "why": why, **facts}


def compare(folder: Path, tokenizer: Any) -> dict[str, list[str]]:
    """Return the kinds of text for which the converted tokenizer differs from transformers', by what it does otherwise."""
    import openvino_tokenizers  # noqa: F401 - registers the operators of these models

    core = ov.Core()
    encode, decode = (core.compile_model(folder / name, "CPU") for name in (TOKENIZER, DETOKENIZER))
    differing: dict[str, list[str]] = {}
    for kind, texts in TEXTS.items():
        wanted = [tokenizer(text, verbose=False)["input_ids"] for text in texts]
        if any(encode([text])["input_ids"][0].tolist() != ids for text, ids in zip(texts, wanted, strict=True)):
            differing.setdefault("splits text", []).append(kind.value)
        if any(ids and decode([ids])[0][0] != tokenizer.decode(ids, skip_special_tokens=True) for ids in wanted):
            differing.setdefault("joins tokens", []).append(kind.value)
    if rendered := list(_find_prompt_differences(folder, tokenizer)):
        differing["writes prompts"] = rendered
    return differing


def _find_prompt_differences(folder: Path, tokenizer: Any) -> Iterator[str]:
    """Yield the conversations for which openvino-genai writes another prompt; none if it is not installed."""
    if not _can_render(tokenizer):
        return
    wanted = dict(_prompts(tokenizer))
    import openvino_genai

    reader = openvino_genai.Tokenizer(folder)
    for name, (messages, tools) in CONVERSATIONS.items():
        given = {"tools": list(tools)} if tools else {}
        if (
            name in wanted
            and reader.apply_chat_template(list(messages), add_generation_prompt=True, **given) != wanted[name]
        ):
            yield name


def _prompts(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Yield transformers' prompts for the conversations that the template supports.

    Raises:
        EndlessTemplateError: The template does not end; in openvino-genai it would block this process.
    """
    with ChatTemplates() as templates:
        for name, (messages, tools) in CONVERSATIONS.items():
            if tools and "tools" not in str(tokenizer.chat_template):
                continue
            given = {"tools": list(tools)} if tools else {}
            try:
                yield name, templates.text(tokenizer, messages, add_generation_prompt=True, **given)
            except EndlessTemplateError:
                raise
            except TemplateError:
                continue


def _can_render(tokenizer: Any) -> bool:
    return bool(tokenizer.chat_template) and find_spec("openvino_genai") is not None

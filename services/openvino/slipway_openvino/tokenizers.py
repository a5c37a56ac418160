"""Convert the tokenizer for openvino-genai, and compare it with transformers' on difficult texts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipway.model.chat_templates import ChatTemplates, EndlessTemplateError, TemplateError
from slipway.model.model_files import tokenizer_files
from slipway.stage import Context
from slipway.texts import counted, one_line, shortened
from slipway.validation.texts import CONVERSATIONS, TEXTS, HardConversation, TextKind
from slipway_openvino.graphs.passes import number_nodes
from slipway_openvino.library import ov

TOKENIZER, DETOKENIZER = "openvino_tokenizer.xml", "openvino_detokenizer.xml"
COMPARED = sum(map(len, TEXTS.values()))
_LONGEST_MESSAGE = 300
_INSTALLED = ("sentencepiece_version", "tiktoken_version")
"""Keys under which openvino-tokenizers records installed packages, used or not. With them, a model's bytes would depend on the machine."""
_PROMPTS, _FURTHER = "writes prompts", "writes further prompts"
"""What a converted tokenizer does otherwise: prompts of the further conversations are named, and keep no tokenizer from being delivered."""
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
    further: list[str] = []
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
        further = differing.pop(_FURTHER, [])
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
        ctx.record(prompts_compared=_can_render(tokenizer), prompts_differing=further)
        if further:
            ctx.warn(
                f"openvino-genai writes {counted(len(further), 'conversation')} with calls of tools, or with thinking switched, otherwise "
                f"than transformers; the shortest is {further[0]}: give it such prompts as text"
            )
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
    found = list(_find_prompt_differences(folder, tokenizer))
    for what, judged in ((_PROMPTS, True), (_FURTHER, False)):
        if names := [name for name in found if CONVERSATIONS[name].judged is judged]:
            differing[what] = names
    return differing


def _find_prompt_differences(folder: Path, tokenizer: Any) -> Iterator[str]:
    """Yield the conversations for which openvino-genai writes another prompt, the shortest first; none if it is not installed."""
    if not _can_render(tokenizer):
        return
    wanted = dict(_prompts(tokenizer))
    import openvino_genai

    reader = openvino_genai.Tokenizer(folder)
    for name in sorted(wanted, key=lambda each: len(wanted[each])):
        if _genai_prompt(reader, CONVERSATIONS[name]) != wanted[name]:
            yield name


def _genai_prompt(reader: Any, conversation: HardConversation) -> str | None:
    """Return openvino-genai's prompt; None if its engine of templates cannot write one of the conversations that are named only."""
    given: dict[str, Any] = {"tools": list(conversation.tools)} if conversation.tools else {}
    if conversation.options:
        given["extra_context"] = dict(conversation.options)
    try:
        return str(reader.apply_chat_template(list(conversation.messages), add_generation_prompt=True, **given))
    except RuntimeError:
        if conversation.judged:
            raise
        return None


def _prompts(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Yield transformers' prompts for the conversations that the template supports.

    Raises:
        EndlessTemplateError: The template does not end; in openvino-genai it would block this process.
    """
    with ChatTemplates() as templates:
        for name, each in CONVERSATIONS.items():
            if not each.fits(str(tokenizer.chat_template)):
                continue
            given = {**({"tools": list(each.tools)} if each.tools else {}), **each.options}
            try:
                yield name, templates.text(tokenizer, each.messages, add_generation_prompt=True, **given)
            except EndlessTemplateError:
                raise
            except TemplateError:
                continue


def _can_render(tokenizer: Any) -> bool:
    return bool(tokenizer.chat_template) and find_spec("openvino_genai") is not None

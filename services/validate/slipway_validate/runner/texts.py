"""Read hard texts and conversations: first as transformers does, into a file, then as a runtime does with what an output holds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from slipway.model.chat_templates import ChatTemplates, EndlessTemplateError, TemplateError
from slipway.proof.runtime import LanguageModel, Unusable
from slipway.texts import shortened
from slipway.validation.texts import CONVERSATIONS, TEXTS, TextComparison, TextKind
from slipway_validate.protocol.messages import TextSpec
from slipway_validate.runner.sampling.making import trained_tokenizer

_MOST_SPECIAL = 24
_SHOWN = 160


def write_texts(spec: TextSpec) -> None:
    """Write how transformers reads hard texts and conversations.

    Raises:
        Unusable: There is no tokenizer, or its chat template does not end.
    """
    tokenizer = trained_tokenizer(spec.tokenizer, spec.base)
    texts = [(kind, text) for kind, several in TEXTS.items() for text in several]
    texts += _special_texts(tokenizer)
    contents = ReadTexts(
        texts=tuple(
            ReadText(kind=kind, text=text, ids=tuple(tokenizer(text, verbose=False)["input_ids"]))
            for kind, text in texts
        ),
        conversations=tuple(_conversations(tokenizer)) if tokenizer.chat_template else (),
        begin=tokenizer.bos_token or "",
    )
    spec.file.write_text(contents.model_dump_json(), encoding="utf-8")


def compare_texts(model: LanguageModel, file: Path) -> TextComparison | None:
    """Return how a runtime reads texts, compared with transformers; None if it reads none."""
    if not model.reads_text:
        return None
    wanted, known = ReadTexts.model_validate_json(file.read_bytes()), model.text_differences()
    different = [each for each in wanted.texts if tuple(model.tokens_of(each.text)) != each.ids]
    excused = [each for each in different if each.kind in known]
    wrong = [each for each in different if each.kind not in known]
    rendered = [(each, _render(model, each, wanted.begin)) for each in wanted.conversations]
    otherwise = sorted(
        ((each, got) for each, got in rendered if got != each.prompt), key=lambda pair: len(pair[0].prompt)
    )
    faults = [pair for pair in otherwise if pair[0].judged]
    further = [pair for pair in otherwise if not pair[0].judged]
    return TextComparison(
        texts=len(wanted.texts),
        different=len(wrong),
        excused=len(excused),
        excused_kinds=tuple(dict.fromkeys(each.kind.value for each in excused)),
        first_difference=_describe_tokens(model, wrong[0]) if wrong else "",
        conversations=sum(each.judged for each in wanted.conversations),
        rendered_otherwise=len(faults),
        first_rendered=_describe_prompts(*faults[0]) if faults else "",
        further=sum(not each.judged for each in wanted.conversations),
        further_otherwise=len(further),
        first_further=_describe_prompts(*further[0]) if further else "",
        template_missing=any(got is None for _, got in otherwise),
    )


def _special_texts(tokenizer: Any) -> Iterator[tuple[TextKind, str]]:
    """Yield texts with the tokenizer's own special tokens, alone, among text and beside spaces."""
    added = sorted(tokenizer.added_tokens_decoder.items())
    # If there are many, only the first, which are mostly for the text's structure, and the last, which were added later.
    chosen = added if len(added) <= _MOST_SPECIAL else added[: _MOST_SPECIAL // 2] + added[-_MOST_SPECIAL // 2 :]
    for _, token in chosen:
        text = str(token.content)
        yield TextKind.SPECIAL, f"{text}"
        yield TextKind.SPECIAL, f"word{text}word\n{text}{text}"
        yield TextKind.SPECIAL_SPACES, f"a {text} b  {text}\n\n {text} "


def _conversations(tokenizer: Any) -> Iterator[Conversation]:
    """Yield the conversations that the chat template takes. Runtimes give it today's date, for which transformers leaves a fixed one."""
    template = str(tokenizer.chat_template)
    today = datetime.now().astimezone().strftime("%d %b %Y")
    with ChatTemplates() as templates:
        for name, each in CONVERSATIONS.items():
            if not each.fits(template):
                continue
            given = {"tools": list(each.tools), "add_generation_prompt": True, "date_string": today, **each.options}
            try:
                prompt = templates.text(tokenizer, each.messages, **given)
            except EndlessTemplateError as error:
                raise Unusable(str(error)) from error
            except TemplateError:
                continue
            yield Conversation(
                name=name,
                messages=each.messages,
                tools=each.tools,
                options=dict(each.options),
                judged=each.judged,
                prompt=prompt,
            )


def _render(model: LanguageModel, conversation: Conversation, begin: str) -> str | None:
    """Render a conversation. A begin of text that the runtime adds itself is put back."""
    try:
        options = {"options": conversation.options} if conversation.options else {}
        prompt = model.rendered(conversation.messages, conversation.tools, **options)
    except Unusable as error:
        return _Refusal(str(error))
    if prompt is not None and begin and begin + prompt == conversation.prompt:
        return conversation.prompt
    return prompt


def _describe_tokens(model: LanguageModel, text: ReadText) -> str:
    own = model.tokens_of(text.text)
    place = next((at for at, pair in enumerate(zip(own, text.ids, strict=False)) if pair[0] != pair[1]), 0)
    ours, theirs = (shortened(str(list(ids[place : place + 8])), _SHOWN) for ids in (own, text.ids))
    return f"{text.kind.value}, {shortened(repr(text.text), _SHOWN)}: from token {place} on {ours} instead of {theirs}"


def _describe_prompts(conversation: Conversation, prompt: str | None) -> str:
    if prompt is None:
        return f"{conversation.name}: there is no chat template"
    if isinstance(prompt, _Refusal):
        return f"{conversation.name}: {shortened(prompt, 2 * _SHOWN)}"
    place = next(
        (at for at, pair in enumerate(zip(prompt, conversation.prompt, strict=False)) if pair[0] != pair[1]),
        min(len(prompt), len(conversation.prompt)),
    )
    ours, theirs = (repr(text[max(0, place - 20) : place + 60]) for text in (prompt, conversation.prompt))
    return f"{conversation.name}: {ours} instead of {theirs}"


class _Refusal(str):
    """Why a runtime writes no prompt, in place of one."""

    __slots__ = ()


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReadText(_Message):
    """A text and its tokens, with those that the tokenizer puts around it."""

    kind: TextKind
    text: str
    ids: tuple[int, ...]


class Conversation(_Message):
    """A conversation, and the prompt that the chat template makes of it.

    Attributes:
        name: What it has, in words.
        messages: Its messages.
        tools: Tools that are offered.
        options: What the template is given beside them.
        judged: Whether another prompt is a fault.
        prompt: The prompt, which ends where the model's answer begins.
    """

    name: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = {}
    judged: bool = True
    prompt: str


class ReadTexts(_Message):
    """What transformers reads.

    Attributes:
        texts: Hard texts.
        conversations: Conversations that the chat template takes; none without a template.
        begin: Text of the token that begins each text, which a runtime may put there itself.
    """

    texts: tuple[ReadText, ...]
    conversations: tuple[Conversation, ...] = ()
    begin: str = ""

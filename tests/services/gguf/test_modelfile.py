"""The Modelfile for Ollama beside a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="names types: pip install 'slipway-ml[gguf]'")
from slipway.machine.bounded.process import Bounds
from slipway_gguf import modelfile
from slipway_gguf.modelfile import NAME, ollama_template, quote, write
from slipway_gguf.vocabulary import rendering
from slipway_gguf.vocabulary.documents import AddedToken, TokenizerFiles
from slipway_gguf.vocabulary.splitting import KNOWN
from support.models.tokenizers_of_kinds import MARKS, byte_level, save

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_a_plain_template_is_written_in_ollamas_language(tmp_path: Path) -> None:
    tokenizer = byte_level(next(iter(KNOWN)))
    settings = {"eos_token": MARKS[1], "chat_template": _CHATML}
    generation = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "eos_token_id": [tokenizer.token_to_id(MARKS[2]), tokenizer.token_to_id(MARKS[1])],
    }
    write(
        tmp_path, "tiny-F16.gguf", save(tokenizer, tmp_path / "model", settings=settings, generation_config=generation)
    )
    assert (tmp_path / NAME).read_text(encoding="utf-8").splitlines() == [
        "FROM ./tiny-F16.gguf",
        'TEMPLATE """{{ range .Messages }}<|im_start|>{{ .Role }}',
        "{{ .Content }}<|im_end|>",
        "{{ end }}<|im_start|>assistant",
        '"""',
        'PARAMETER stop "</s>"',
        'PARAMETER stop "<|end|>"',
        "PARAMETER temperature 0.6",
        "PARAMETER top_p 0.95",
        "PARAMETER top_k 20",
        "PARAMETER repeat_penalty 1.1",
    ]


_LLAMA3 = (
    "{% for message in messages %}{% set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_GEMMA = (
    "{% for message in messages %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}"
    "{% elif message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}"
    "{% else %}{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}{{ '<|assistant|>\n' }}"
)


def _files(*, begins: bool = True) -> TokenizerFiles:
    """A tokenizer of which only the begin of a text matters."""
    settings = {"bos_token": "<s>", "add_bos_token": begins}
    begin = {0: AddedToken(0, "<s>", special=True, strips=False)}
    return TokenizerFiles(Path(), {}, {}, {}, begin, settings, {}, {})


@pytest.mark.parametrize(
    ("name", "template"), [("chatml", _CHATML), ("llama3", _LLAMA3), ("gemma", _GEMMA), ("phi3", _PHI3)]
)
def test_a_template_is_known_by_what_it_writes(name: str, template: str) -> None:
    assert ollama_template(template, _files()) == modelfile.KNOWN[name].to_ollama()


def test_a_begin_that_llama_cpp_does_not_add_is_missed() -> None:
    assert not ollama_template(_LLAMA3, _files(begins=False))


_OTHERS = {
    "tools": _CHATML + "{% if tools %}{{ tools }}{% endif %}",
    "instruction": _CHATML + "{{ 'You are helpful.' }}",
    "no-line-end": _CHATML.replace("<|im_end|>\\n", "<|im_end|>"),
    "last-message": _CHATML.replace("in messages", "in messages[-1:]"),
    "upper": _CHATML.replace("message['content']", "message['content'] | upper"),
    "no-thoughts": _CHATML.replace("message['content']", "message['content'].split('</think>')[-1]"),
    "no-system": _GEMMA.replace(
        "{% for", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{% for", 1
    ),
    "wrong": _CHATML + "{% endfor %}",
    "stranger": "{{ messages }}",
    "none": "",
}


@pytest.mark.parametrize("name", _OTHERS)
def test_a_template_that_writes_anything_else_is_left_to_the_file(name: str) -> None:
    assert _OTHERS[name] != _CHATML
    assert not ollama_template(_OTHERS[name], _files())


def test_a_template_that_does_not_end_is_left_to_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_BOUNDS", Bounds(seconds=0.3))
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert not ollama_template(_CHATML + endless, _files())


def test_a_template_reads_nothing_of_the_process() -> None:
    assert not ollama_template(_CHATML + "{% set found = ''.__class__.__mro__ %}", _files())


def test_every_end_of_an_answer_is_a_stop(tmp_path: Path) -> None:
    """A GGUF file has no key for the third end."""
    tokenizer = byte_level(next(iter(KNOWN)))
    tokenizer.add_special_tokens(["<|eom_id|>", "<|eot_id|>"])
    ends = [tokenizer.token_to_id(text) for text in (MARKS[1], "<|eom_id|>", "<|eot_id|>")]
    settings = {"eos_token": "<|eot_id|>", "chat_template": "<|eot_id|><|eom_id|>"}
    model = save(tokenizer, tmp_path / "model", settings=settings, generation_config={"eos_token_id": ends})
    write(tmp_path, "a.gguf", model)
    lines = (tmp_path / NAME).read_text(encoding="utf-8").splitlines()
    assert set(lines) >= {f'PARAMETER stop "{text}"' for text in (MARKS[1], "<|eom_id|>", "<|eot_id|>")}


def test_numbers_have_no_exponent(tmp_path: Path) -> None:
    generation = {"top_k": 1_000_000, "min_p": 0.00001, "temperature": 1}
    model = save(byte_level(next(iter(KNOWN))), tmp_path / "model", settings={}, generation_config=generation)
    write(tmp_path, "a.gguf", model)
    lines = (tmp_path / NAME).read_text(encoding="utf-8").splitlines()
    assert lines[1:] == ["PARAMETER temperature 1", "PARAMETER top_k 1000000", "PARAMETER min_p 0.00001"]


def test_greedy_models_are_greedy(tmp_path: Path) -> None:
    model = save(byte_level(next(iter(KNOWN))), tmp_path / "model", settings={}, generation_config={"do_sample": False})
    write(tmp_path, "a.gguf", model)
    assert (tmp_path / NAME).read_text(encoding="utf-8") == "FROM ./a.gguf\nPARAMETER temperature 0\n"


def test_values_are_quoted() -> None:
    assert quote("a b") == '"a b"'
    assert quote('say "x"\n') == '"""say "x"\n"""'
    with pytest.raises(ValueError, match="cannot hold"):
        quote('a"""b')

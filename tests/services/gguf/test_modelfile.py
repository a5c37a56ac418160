"""The Modelfile for Ollama beside a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="names types: pip install 'slipway[gguf]'")
from slipway_gguf.modelfile import NAME, ollama_template, quoted, write
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


@pytest.mark.parametrize(
    "more",
    [
        "{% if tools %}{{ tools }}{% endif %}{{ 'You may call' }}",
        "{{ 'You are helpful.' }}",
        "You are helpful.",
        "{% if not messages %}Hello{% endif %}",
    ],
)
def test_a_template_that_says_more_is_left_to_the_file(more: str) -> None:
    assert ollama_template(_CHATML)
    assert not ollama_template(_CHATML + more)
    assert not ollama_template("")


def test_greedy_models_are_greedy(tmp_path: Path) -> None:
    model = save(byte_level(next(iter(KNOWN))), tmp_path / "model", settings={}, generation_config={"do_sample": False})
    write(tmp_path, "a.gguf", model)
    assert (tmp_path / NAME).read_text(encoding="utf-8") == "FROM ./a.gguf\nPARAMETER temperature 0\n"


def test_values_are_quoted() -> None:
    assert quoted("a b") == '"a b"'
    assert quoted('say "x"\n') == '"""say "x"\n"""'
    with pytest.raises(ValueError, match="cannot hold"):
        quoted('a"""b')

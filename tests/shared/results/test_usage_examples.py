"""The usage examples of the model card: the prompt they use, and the message of one that cannot run here."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models import qwen3_asr

from slipway.formats import Usage
from slipway.formats.registry import formats
from slipway.model.model_files import has_chat_template
from slipway.model.tokens.sound import SOUND_CODECS
from slipway.results.report import write_report
from support.commands.report_parts import result
from support.commands.usage_examples import usage_examples
from support.models.current_kinds import make_kind
from support.models.family_models import make_family_model
from support.models.judged_families import save_raw_extractor
from support.models.merge_models import make_family
from support.models.sentence_models import write_modules, write_prompts
from support.models.sound_models import make_speaker
from support.models.tiny_models import save_tokenizer
from support.models.transformers_results import write_sound
from support.models.whisper_models import make_whisper

FOLDERS = ("pytorch", "pytorch-int4", "onnx", "onnx-int8", "tensorrt")
# Line breaks and indents that a template has only where jinja2's blocks are not trimmed.
TEMPLATE = """\
{%- for message in messages %}
    {% if loop.index0 is divisibleby 2 %}
<{{ message["role"] }}> {{ message["content"] | trim }} {{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<assistant>
{% endif %}
"""
PROMPT = "<user> Tell me a story. <eos>\n<assistant>\n"
PARTS = ("from transformers", "from tokenizers", "folder =", "tokenizer =", "messages =", "prompt =")
"""What the lines of an example begin with that make its prompt."""


def written(directory: Path, *, template: str | None) -> dict[str, str]:
    """Return the examples of a card for folders with a tokenizer each."""
    for name in FOLDERS:
        save_tokenizer(directory / name)
        if template is not None:
            (directory / name / "chat_template.jinja").write_text(template)
    write_report(directory, result=result(None, FOLDERS))
    return usage_examples((directory / "README.md").read_text())


def prompt_of(code: str) -> list[int]:
    """Return the token ids that an example, run in the current folder, gives to the model."""
    values: dict[str, Any] = {}
    exec("\n".join(line for line in code.splitlines() if line.startswith(PARTS)), values)
    found = values["prompt"]
    return found if isinstance(found, list) else found["input_ids"][0].tolist()


def test_the_prompt_is_the_chat_template_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    examples = written(tmp_path, template=TEMPLATE)
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained("onnx")
    messages = [{"role": "user", "content": "Tell me a story."}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == PROMPT
    expected = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    assert {name: prompt_of(code) for name, code in examples.items()} == dict.fromkeys(FOLDERS, expected)


def test_a_format_whose_example_fails_loses_only_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "an_odd_package").mkdir()
    (tmp_path / "an_odd_package" / "__init__.py").touch()
    (tmp_path / "an_odd_package" / "usage.j2").write_text("{{ 1 / 0 }}")
    monkeypatch.syspath_prepend(tmp_path)
    usage = Usage(template=("an_odd_package", "usage.j2"), library="onnx", packages="onnx")
    monkeypatch.setitem(formats(), "onnx", replace(formats()["onnx"], usage=usage))
    assert set(written(tmp_path / "out", template=None)) == {"pytorch", "pytorch-int4", "tensorrt"}
    assert "the format onnx fails: ZeroDivisionError" in caplog.text


def test_without_a_chat_template_the_prompt_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    examples = written(tmp_path, template=None)
    monkeypatch.chdir(tmp_path)
    expected = AutoTokenizer.from_pretrained("onnx")("Once upon a time")["input_ids"]
    assert {name: prompt_of(code) for name, code in examples.items()} == dict.fromkeys(FOLDERS, expected)


@pytest.mark.parametrize(
    ("setting", "file", "expected"),
    [
        (None, None, False),
        (None, TEMPLATE, True),
        (TEMPLATE, None, True),
        ([{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TEMPLATE}], None, True),
        ([{"name": "rag", "template": TEMPLATE}, {"name": "tool_use", "template": TEMPLATE}], None, False),
    ],
    ids=["none", "file", "setting", "several", "none is the default"],
)
def test_a_chat_template_is_found_where_transformers_finds_it(
    tmp_path: Path, setting: object, file: str | None, expected: bool
) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    if setting is not None:
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": setting}))
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    try:
        theirs = bool(AutoTokenizer.from_pretrained(tmp_path).get_chat_template())
    except ValueError:
        theirs = False
    assert has_chat_template(tmp_path) is theirs is expected


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"chat_template": 1}', '{"chat_template": [1]}', "[" * 100_000, "\udcff"]
)
def test_settings_that_are_no_settings_have_no_chat_template(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert not has_chat_template(tmp_path)


@pytest.mark.slow
def test_an_engine_without_a_gpu_says_what_is_missing(tmp_path: Path) -> None:
    code = written(tmp_path, template=TEMPLATE)["tensorrt"]
    without = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=without, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1, run.stderr
    assert "NVIDIA GPU, its driver" in run.stderr


@pytest.mark.parametrize(
    ("kind", "reads"),
    [
        ("bert-classes", 'values["logits"].argmax(-1)'),
        ("roberta-questions", 'values["end_logits"]'),
        ("bert-masked", "tokenizer.decode("),
        ("bert-features", 'values["last_hidden_state"]'),
    ],
)
def test_an_engine_of_an_encoder_has_an_example_of_its_family(tmp_path: Path, kind: str, reads: str) -> None:
    make_family_model(kind, tmp_path / "tensorrt")
    write_report(tmp_path, result=result(None, ("tensorrt",)))
    code = usage_examples((tmp_path / "README.md").read_text())["tensorrt"]
    compile(code, "example.py", "exec")
    assert reads in code
    assert "cache" not in code


@pytest.mark.parametrize(
    ("kind", "pipeline", "says"),
    [
        ("gpt2", "text-generation", ""),
        ("marian", "text2text-generation", ""),
        ("t5", "text2text-generation", ""),
        ("bert-classes", "text-classification", "LABEL_"),
        ("bert-tokens", "token-classification", "LABEL_"),
        ("roberta-questions", "question-answering", ""),
        ("bert-masked", "fill-mask", ""),
        ("bert-features", "feature-extraction", "tensor"),
    ],
)
def test_the_example_of_a_family_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    pipeline: str,
    says: str,
) -> None:
    make_family_model(kind, tmp_path / "pytorch")
    write_report(tmp_path, result=result(None, ("pytorch",)))
    card = (tmp_path / "README.md").read_text()
    assert f"pipeline_tag: {pipeline}" in card
    monkeypatch.chdir(tmp_path)
    exec(usage_examples(card)["pytorch"], {})
    shown = capsys.readouterr().out.strip()
    assert shown
    assert says in shown


@pytest.mark.parametrize(
    ("kind", "loader"), [("qwen3-vl", "AutoModelForImageTextToText"), ("gemma3-vision", "AutoModelForCausalLM")]
)
def test_the_example_of_a_model_that_takes_images_too_loads_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, loader: str
) -> None:
    make_kind(kind, tmp_path).base.rename(tmp_path / "pytorch")
    write_report(tmp_path, result=result(None, ("pytorch",)))
    code = usage_examples((tmp_path / "README.md").read_text())["pytorch"]
    assert f"from transformers import {loader}, AutoTokenizer" in code
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {}
    exec(code, values)
    assert type(values["model"]).__name__.endswith("ForConditionalGeneration")


SNAC = SOUND_CODECS[0]


def test_a_model_of_speech_shows_numbers_of_tokens_and_names_its_codec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="the trained tokenizer comes with the tests of GGUF")
    model = make_speaker(SNAC, tmp_path / "pytorch")
    write_report(tmp_path, result=result(None, ("pytorch",)))
    card = (tmp_path / "README.md").read_text()
    assert "pipeline_tag: text-to-speech" in card
    assert "text-generation" not in card
    assert "answers are tokens of the codec SNAC (24 kHz, hubertsiuzdak/snac_24khz)" in card
    assert "is not part of the model" in card
    monkeypatch.chdir(tmp_path)
    exec(usage_examples(card)["pytorch"], {})
    shown = ast.literal_eval(capsys.readouterr().out.strip())
    assert len(shown) > 40
    assert min(shown[-40:]) >= model.config.vocab_size - 1024


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_no_example_of_a_model_of_speech_shows_a_text(chat: bool, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the trained tokenizer comes with the tests of GGUF")
    decoders = [name for name, each in formats().items() if each.usage is not None and name != "npz"]
    for name in decoders:
        make_speaker(SNAC, tmp_path / name)
        if chat:
            (tmp_path / name / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("model.onnx", "adapter_config.json", "tiny-LoRA.gguf"):
        (tmp_path / "adapter" / name).touch()
    (tmp_path / "openvino" / "openvino_tokenizer.xml").touch()
    write_report(tmp_path, result=result(None, decoders))
    examples = usage_examples((tmp_path / "README.md").read_text())
    assert set(examples) == set(decoders)
    for name, code in examples.items():
        compile(code, name, "exec")
        shown = [line for line in code.splitlines() if line.startswith("print(")]
        assert shown, name
        assert all(line.startswith("print([int(") for line in shown), (name, shown)


def test_a_hostile_prompt_stays_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = '```\n"""\'); raise SystemExit(1)\n# {{ 1 / 0 }} | <b> \u202e \U0001f50e'
    make_family_model("bert-features", tmp_path / "onnx")
    write_prompts(write_modules(tmp_path / "onnx"), {"query": hostile, "a | `b`": "c"}, "a | `b`")
    write_report(tmp_path, result=result(None, ("onnx",)))
    card = (tmp_path / "README.md").read_text()
    (line,) = [line for line in usage_examples(card)["onnx"].splitlines() if line.startswith("one, other = ")]
    seen: list[str] = []
    exec(line, {"encode": seen.append})
    assert seen == [hostile + "How old are you?", "What is your age?"]
    (row,) = [line for line in card.splitlines() if line.startswith("| query |")]
    assert row.count(" | ") == 2
    assert "| a \\| \\`b\\` | " in card


def test_a_classifier_shows_the_probability_of_each_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_family_model("bert-classes", tmp_path / "pytorch")
    write_report(tmp_path, result=result(None, ("pytorch",)))
    monkeypatch.chdir(tmp_path)
    exec(usage_examples((tmp_path / "README.md").read_text())["pytorch"], {})
    shares = ast.literal_eval(capsys.readouterr().out.strip())
    labels = json.loads((tmp_path / "pytorch" / "config.json").read_text())["id2label"]
    assert set(shares) == set(labels.values())
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("kind", ["vit", "clip", "t5 without a head"])
def test_a_model_of_no_known_family_has_no_example_and_no_task(tmp_path: Path, kind: str) -> None:
    make_family(kind).save_pretrained(tmp_path / "pytorch")
    write_report(tmp_path, result=result(None, ("pytorch",)))
    card = (tmp_path / "README.md").read_text()
    assert "pipeline_tag" not in card
    assert "text-generation" not in card
    assert usage_examples(card) == {}


def make_moonshine(folder: Path) -> None:
    make_family_model("moonshine", folder)
    save_raw_extractor(folder)


def make_transcriber(folder: Path) -> None:
    """Save a Qwen3-ASR with the files of its processor."""
    kind = make_kind("qwen3-asr", folder.parent / "kind")
    shutil.copytree(kind.base, folder)
    names = {f"audio_{name}": f"<|audio_{name}|>" for name in ("token", "bos_token", "eos_token")}
    plain = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, eos_token="<eos>", pad_token="<eos>", extra_special_tokens=names
    )
    template = (
        "{% for message in messages %}{{ message.role }}: {% for part in message.content %}{% if part.type == 'audio' %}"
        "<|audio_bos_token|><|audio_token|><|audio_eos_token|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    extractor = qwen3_asr.Qwen3ASRFeatureExtractor(feature_size=16)
    qwen3_asr.Qwen3ASRProcessor(extractor, tokenizer, chat_template=template).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["audio_token_id"] = tokenizer.convert_tokens_to_ids(names["audio_token"])
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("make", [make_whisper, make_moonshine, make_transcriber])
def test_the_example_of_a_speech_model_takes_a_sound_file(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "pytorch")
    write_report(tmp_path, result=result(None, ("pytorch",)))
    card = (tmp_path / "README.md").read_text()
    assert "pipeline_tag: automatic-speech-recognition" in card
    code = usage_examples(card)["pytorch"]
    loader = "AutoModelForMultimodalLM" if make is make_transcriber else "AutoModelForSpeechSeq2Seq"
    assert f"AutoProcessor, {loader}" in code
    write_sound(tmp_path / "speech.wav", seconds=1.0)
    monkeypatch.chdir(tmp_path)
    exec(code, {})


def test_the_example_of_a_model_in_layers_runs_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = tmp_path / "onnx" / "onnx-layered"
    layers.mkdir(parents=True)
    (layers / "example.py").write_text("import sys\nprint('told', sys.argv[1:])\n")
    save_tokenizer(tmp_path / "onnx")
    write_report(tmp_path, result=result(None, ("onnx",)))
    code = usage_examples((tmp_path / "README.md").read_text())["onnx"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["example"])
    exec(code, {})
    assert capsys.readouterr().out == "told ['Once upon a time']\n"

"""The text for calibration: read within limits, in the model's own form, apart from the held-out text, the same for a seed."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipway.documents.heldout import built_in_text
from slipway.documents.separation import overlap_share, shingles
from slipway.errors import QuantizationError
from slipway.stage import Context
from slipway_quantize.calibration_data.choice import built_in_documents
from slipway_quantize.calibration_data.params import CalibrationDataParams
from slipway_quantize.calibration_data.stage import STAGE
from support.hostile.endless import HALVES, LOOPS

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"

Run = Callable[..., tuple[list[str], dict[str, Any]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Run:
    """Runs the stage; returns the chosen texts and their profile."""
    runs = iter(range(100))

    def call(calibration: Path | None = None, *, heldout: Path | None = None, **params: Any) -> Any:
        workdir = tmp_path / f"attempt-{next(runs)}"
        workdir.mkdir()
        ctx = Context(workdir=workdir, log=logging.getLogger("test"))
        inputs = {"model": params.pop("model", model), "calibration": calibration, "heldout": heldout}
        found = STAGE.run({k: v for k, v in inputs.items() if v}, CalibrationDataParams(**params), ctx)["data"]
        lines = (found / "calibration.jsonl").read_text().splitlines()
        return [json.loads(line)["text"] for line in lines], {
            **json.loads((found / "profile.json").read_text()),
            "warnings": ctx.facts.get("warnings", []),
        }

    return call


def words(count: int, seed: int = 0, letters: str = "abcdefghij") -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(count))


def folder(path: Path, **files: str | bytes) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (path / name.replace("__", ".")).write_bytes(data)
    return path


def test_texts_and_conversations_of_every_kind_are_read(run: Run, tmp_path: Path) -> None:
    rows = [{"text": words(200, 1)}, {"messages": [{"role": "user", "content": words(200, 2)}]}]
    rows += [{"prompt": "ask " + words(200, 3), "completion": "say " + words(200, 4)}]
    data = folder(
        tmp_path / "data",
        a__txt=words(300, 5),
        b__jsonl="\n".join(map(json.dumps, rows)) + "\n\n",
        c__json=json.dumps([{"text": words(200, 6)}, words(200, 7)]),
        d__md="not read",
    )
    texts, profile = run(data)
    assert profile["passages"] == len(texts) == 6
    assert f"<user>{words(200, 2)}</>" in texts
    assert f"<user>ask {words(200, 3)}</><assistant>say {words(200, 4)}</>" in texts
    assert {words(300, 5), words(200, 1), words(200, 6), words(200, 7)} <= set(texts)
    assert profile["tokens"] == sum(len(text.encode()) for text in texts)
    assert profile["scripts"] == {"LATIN": 1.0}
    assert profile["source"] == "the given text"


def test_the_choice_is_that_of_the_seed(run: Run, tmp_path: Path) -> None:
    data = folder(tmp_path / "data", a__txt="\n".join(words(30, seed) for seed in range(400)))
    first, profile = run(data, tokens=20_000)
    again, same = run(data, tokens=20_000)
    other, _ = run(data, tokens=20_000, seed=1)
    assert first == again != other
    assert profile["sha256"] == same["sha256"]
    assert 20_000 <= profile["tokens"] < 25_000
    assert sum(not text.endswith("\n") for text in first) <= 1  # cut between lines; the last line has no end


def test_the_profile_shows_scripts_and_coverage(run: Run, tmp_path: Path) -> None:
    data = folder(tmp_path / "data", a__txt=words(100) + "\n" + words(300, letters="абвгдежзи"))
    _, profile = run(data)
    assert list(profile["scripts"]) == ["CYRILLIC", "LATIN"]
    assert 0 < profile["vocabulary"]["coverage"] < 0.2
    assert profile["passage_tokens"]["longest"] <= profile["tokens"]


def test_passages_that_are_in_the_held_out_text_are_left_out_by_name(run: Run, tmp_path: Path) -> None:
    heldout = folder(tmp_path / "heldout", a__txt=words(4000, 1))
    part = words(4000, 1)[:2000]
    data = folder(tmp_path / "data", a__txt=words(6000, 2) + "\n" + part.upper().replace(" ", "\n "))
    assert run(data, heldout=heldout, overlap="ignore")[1].get("heldout") is None
    texts, profile = run(data, heldout=heldout)
    assert profile["heldout"]["passages_left_out"] == 2
    assert profile["heldout"]["documents_left_out"] == ["a.txt"]
    assert len(profile["warnings"]) == 1
    assert "a.txt" in profile["warnings"][0]
    assert profile["heldout"]["overlap"] < 0.01
    assert not any(part[:200].upper() in text for text in texts)


def test_an_export_ends_only_where_too_little_text_is_left(run: Run, tmp_path: Path) -> None:
    text = words(6000, 1)
    heldout = folder(tmp_path / "heldout", a__txt=text)
    with pytest.raises(QuantizationError, match="in the held-out text too") as caught:
        run(folder(tmp_path / "data", a__txt=text), heldout=heldout)
    assert caught.value.reason == "CALIBRATION_OVERLAP"


def test_what_a_template_adds_is_no_overlap(run: Run, tmp_path: Path) -> None:
    """A trainer's own split: all conversations share the template, its system prompt and the frame of the question."""
    frame = "<|im_start|>system You are a helpful assistant named SmolLM, trained by Hugging Face<|im_end|><|im_start|>user Explain the topic "
    texts = [
        f"{frame}{words(12, seed)} <|im_end|><|im_start|>assistant {words(400, seed)}<|im_end|>" for seed in range(24)
    ]
    heldout = folder(tmp_path / "heldout", **{f"{place}__txt": text for place, text in enumerate(texts[20:])})
    rows = "\n".join(json.dumps({"text": text}) for text in [*texts[:20], texts[21]])
    found, profile = run(folder(tmp_path / "data", a__jsonl=rows), heldout=heldout)
    assert profile["heldout"]["passages_left_out"] == 1
    assert profile["heldout"]["documents_left_out"] == ["a.jsonl, line 21"]
    assert len(found) == 20


def test_a_phrase_that_many_texts_have_is_no_overlap(run: Run, tmp_path: Path) -> None:
    phrase = "licensed under the Apache License, Version 2.0; you may not use this file except in compliance with it"
    heldout = folder(tmp_path / "heldout", a__txt=words(20_000, 1) + phrase)
    _, profile = run(folder(tmp_path / "data", a__txt=phrase + words(6000, 2)), heldout=heldout)
    assert 0 < profile["heldout"]["overlap"] < 0.01


@pytest.mark.parametrize("letters", ["abcdefghij", "天地玄黄宇宙洪荒日月", "абвгдежзик"])
def test_overlap_is_measured_in_every_language(letters: str) -> None:
    draw = random.Random(0)
    one, other = ("".join(draw.choices(letters + " ", k=8000)) for _ in range(2))
    held_out = shingles(one)
    assert overlap_share(held_out, shingles(other)) == 0
    assert overlap_share(held_out, shingles(other + one[: len(one) // 2])) == pytest.approx(0.5, abs=0.1)
    assert overlap_share(held_out, shingles(one)) == 1
    assert overlap_share(shingles("short"), held_out) == 0


def test_the_built_in_text_is_apart_from_the_built_in_held_out_text(run: Run) -> None:
    _, profile = run(tokens=200_000, overlap="leave_out")
    assert profile["tokens"] >= 200_000
    assert profile["heldout"]["overlap"] < 0.01
    assert profile["source"].startswith("built-in text")
    held_out = built_in_text()
    assert not {document.where for document in built_in_documents()} & set(held_out.files)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.txt", b"\xff\xfe broken", "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"text": 3}', 'line 1 has no "text"'),
        ("a.jsonl", b'{"messages": []}', 'line 1 has no "text"'),
        ("a.jsonl", b'{"messages": [{"content": "who"}]}', 'line 1 has no "text"'),
        ("a.jsonl", b"3", "is not an object"),
        ("a.jsonl", b'{"text": "' + b"a" * (1 << 20) + b'"}', "has a line of more than"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}', "half of a surrogate pair"),
        ("a.json", b'{"a": 1}', "holds no list"),
        ("a.json", b"[1]", "entry 1 is not an object"),
        ("a.txt", b"short", "1,024 are needed"),
        ("a.txt", b"", "0 tokens"),
        ("a.parquet", b"PAR1", "arquet file"),
    ],
)
def test_bad_files_are_refused_by_name(run: Run, tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(content)
    with pytest.raises(QuantizationError, match=fault) as caught:
        run(tmp_path / "data")
    assert caught.value.reason == "CALIBRATION_DATA_INVALID"
    assert caught.value.remedy


def test_a_pipe_is_not_waited_for(run: Run, tmp_path: Path) -> None:
    os.mkfifo(folder(tmp_path / "data") / "a.txt")
    with pytest.raises(QuantizationError, match="not a regular file"):
        run(tmp_path / "data")


def test_a_conversation_needs_a_chat_template_that_takes_it(run: Run, model: Path, tmp_path: Path) -> None:
    row = json.dumps({"messages": [{"role": "user", "content": words(400)}]})
    data = folder(tmp_path / "data", a__jsonl=row)
    for template, fault in ((None, "has no chat template"), ("{{ raise_exception('no') }}", "refuses a.jsonl, line 1")):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        tokenizer.chat_template = template
        other = tmp_path / str(len(fault))
        tokenizer.save_pretrained(other)
        with pytest.raises(QuantizationError, match=fault):
            run(data, model=other)
    with pytest.raises(QuantizationError, match="tokenizer cannot be loaded"):
        run(data, model=folder(tmp_path / "none"))


def test_parquet_is_read_and_its_rows_are_counted(run: Run, tmp_path: Path) -> None:
    texts = [words(8, seed=number) for number in range(600)]
    data = folder(tmp_path / "data")
    parquet.write_table(pa.table({"text": texts, "other": range(600)}), data / "a.parquet")
    found, _ = run(data, overlap="ignore")
    assert set(found) <= set(texts)
    texts[520] = None  # type: ignore[call-overload]
    parquet.write_table(pa.table({"text": texts}), data / "a.parquet")
    with pytest.raises(QuantizationError, match=r"a\.parquet, row 521"):
        run(data)


def test_a_parquet_file_that_unpacks_to_much_is_refused_unread(run: Run, tmp_path: Path) -> None:
    data = folder(tmp_path / "data")
    parquet.write_table(
        pa.table({"text": ["x" * (1 << 20)] * 80}), data / "a.parquet", use_dictionary=False, compression="zstd"
    )
    assert (data / "a.parquet").stat().st_size < 1 << 20
    with pytest.raises(QuantizationError, match="when it is unpacked"):
        run(data)


def test_a_small_parquet_file_of_many_values_is_refused(run: Run, tmp_path: Path) -> None:
    """966 bytes took 6 GB, and 5 kB 4.5 GB."""
    data = folder(tmp_path / "data")
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    one = pa.scalar({"role": "user", "content": "a"}, type=message)
    messages = pa.ListArray.from_arrays([0, 3_000_000], pa.repeat(one, 3_000_000))
    parquet.write_table(pa.table({"messages": messages}), data / "a.parquet", compression="zstd")
    assert (data / "a.parquet").stat().st_size < 2000
    with pytest.raises(QuantizationError, match="6,000,000 values"):
        run(data)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, type=pa.int32()), pa.array(["a" * 4_000_000]))
    for column in (texts, ["a" * 4_000_000] * 40):
        parquet.write_table(pa.table({"text": column}), data / "a.parquet", compression="zstd")
        assert (data / "a.parquet").stat().st_size < 2000
        with pytest.raises(QuantizationError, match="when it is unpacked"):
            run(data)


def test_a_document_of_many_values_is_refused(run: Run, tmp_path: Path) -> None:
    data = folder(tmp_path / "data", a__json=b"[" + b"[]," * 20_000_000 + b"[]]")
    with pytest.raises(QuantizationError, match="more than 4194304 values"):
        run(data)


@pytest.mark.parametrize(
    ("template", "fault"),
    [pytest.param(LOOPS, "takes more than 5 s", marks=pytest.mark.slow), (HALVES, "half of a character")],
)
def test_a_template_that_does_not_end_or_writes_no_text_is_named(
    run: Run, model: Path, tmp_path: Path, template: str, fault: str
) -> None:
    data = folder(tmp_path / "data", a__jsonl=json.dumps({"messages": [{"role": "user", "content": "Hello"}]}))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(QuantizationError, match=fault) as caught:
        run(data, model=tmp_path / "model")
    assert "a.jsonl, line 1" in str(caught.value)


def test_parquet_that_is_no_text_is_refused(run: Run, tmp_path: Path) -> None:
    data = folder(tmp_path / "data")
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe")]
    )
    parquet.write_table(pa.table({"text": broken}), data / "a.parquet")
    with pytest.raises(QuantizationError, match="not a Parquet file"):
        run(data)


def test_parquet_without_its_library_names_the_remedy(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(QuantizationError, match="pip install pyarrow"):
        run(folder(tmp_path / "data", a__parquet=b"PAR1"))


def test_held_out_conversations_are_compared_as_the_model_reads_them(run: Run, tmp_path: Path) -> None:
    def rows(numbers: range) -> str:
        system = "You are a helpful assistant that was trained by people who wrote this long prompt for everybody"
        return "\n".join(
            json.dumps(
                {"messages": [{"role": "system", "content": system}, {"role": "user", "content": words(400, seed)}]}
            )
            for seed in numbers
        )

    heldout = folder(tmp_path / "heldout", a__jsonl=rows(range(18, 24)))
    texts, profile = run(folder(tmp_path / "data", a__jsonl=rows(range(20))), heldout=heldout)
    assert profile["heldout"]["passages_left_out"] == 2
    assert profile["heldout"]["documents_left_out"] == ["a.jsonl, line 19", "a.jsonl, line 20"]
    assert len(texts) == 18

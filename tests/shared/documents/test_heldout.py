"""The held-out text: of every kind of file, within its limits, and as the model reads it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from slipway.documents import heldout as texts
from slipway.documents.heldout import render
from slipway.errors import ValidationError
from support.models.tiny_models import make_base


def test_held_out_files_in_order_of_name(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.md").write_text("not text")
    text = texts.read_held_out(tmp_path)
    assert render(text.documents, None) == "first\n\nsecond"
    assert text.files == ("a.txt", "b.txt")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValidationError, match="UTF-8"):
        texts.read_held_out(tmp_path)


def test_only_as_much_held_out_text_is_read_as_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_CHARACTERS", 10)
    (tmp_path / "a.txt").write_text("ä" * 7)
    (tmp_path / "b.txt").write_text("€" * 5)
    with (tmp_path / "c.txt").open("wb") as large:
        large.truncate(1 << 40)
    text = texts.read_held_out(tmp_path)
    assert render(text.documents, None) == "äääääää\n\n€"
    assert text.files == ("a.txt", "b.txt")
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.txt").write_bytes("€".encode()[:2])
    with pytest.raises(ValidationError, match="UTF-8"):
        texts.read_held_out(tmp_path)
    (tmp_path / "b.txt").unlink()
    assert render(texts.read_held_out(tmp_path).documents, None) == "\0" * 10


def test_a_python_without_its_documentation_has_built_in_text_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # type: ignore[arg-type] # as where it is not installed
    found = texts.built_in_text()
    assert found.files == texts.BUILT_IN_MODULES
    assert render(found.documents, None)


def test_built_in_text_is_the_same_each_time_and_says_what_it_is() -> None:
    assert texts.built_in_text() == texts.built_in_text()
    assert len(render(texts.built_in_text().documents, None)) > 100_000
    assert "no held-out text was given" in texts.built_in_text().source


def tokenizer_with(folder: Path, template: str | None) -> PreTrainedTokenizerFast:
    make_base(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = template
    return tokenizer


def said(*contents: str) -> dict[str, object]:
    return {
        "messages": [
            {"role": role, "content": text} for role, text in zip(("user", "assistant"), contents, strict=False)
        ]
    }


@pytest.mark.parametrize("one_file", [True, False])
def test_conversations_of_every_kind_of_file_are_what_the_model_reads(tmp_path: Path, *, one_file: bool) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps(said("why", "because")) + "\n" + json.dumps({"text": "plain"}))
    expected = ["<user>why</><assistant>because</>", "plain"]
    if not one_file:
        (folder / "b.json").write_text(json.dumps([{"prompt": "ask", "completion": "say"}]))
        parquet.write_table(pa.table({"messages": [said("in", "rows")["messages"]]}), folder / "c.parquet")
        (folder / "d.txt").write_text("a file")
        expected += ["<user>ask</><assistant>say</>", "<user>in</><assistant>rows</>", "a file"]
    text = texts.read_held_out(folder / "a.jsonl" if one_file else folder)
    assert text.files == (("a.jsonl",) if one_file else ("a.jsonl", "b.json", "c.parquet", "d.txt"))
    tokenizer = tokenizer_with(
        tmp_path / "base", "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    )
    written = texts.read_written(text.write(tmp_path / "documents.jsonl"))
    assert render(written, tokenizer) == "\n\n".join(expected)


def test_a_conversation_needs_a_template_that_takes_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(said("why")))
    text = texts.read_held_out(tmp_path / "a.jsonl")
    for template, fault in ((None, "has no chat template"), ("{{ raise_exception('no') }}", "refuses a.jsonl, line 1")):
        with pytest.raises(ValidationError, match=f"held-out text: .*{fault}") as caught:
            render(text.documents, tokenizer_with(tmp_path / str(template is None), template))
        assert caught.value.reason == "VALIDATION_IMPOSSIBLE"
        assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.jsonl", b'{"text": 3}', 'a.jsonl, line 1 has no "text"'),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.json", b'{"a": 1}', "holds no list"),
        ("a.parquet", b"PAR1", "arquet file"),
        ("a.jsonl", b"\n", "no file with text"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValidationError, match=fault) as caught:
        texts.read_held_out(tmp_path)
    assert (caught.value.reason, str(caught.value)[:13]) == ("VALIDATION_IMPOSSIBLE", "held-out text")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ValidationError, match="not a regular file"):
        texts.read_held_out(tmp_path)


def test_a_parquet_file_that_unpacks_to_much_is_refused_unread(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * (1 << 20)] * 80})
    parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression="zstd")
    with pytest.raises(ValidationError, match="when it is unpacked"):
        texts.read_held_out(tmp_path)


@pytest.mark.slow
def test_a_small_parquet_file_that_repeats_a_long_message_is_refused(tmp_path: Path) -> None:
    """Its 1.4 kB are 64 GB of messages."""
    count = 400 * 40
    content = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["ab" * 2_000_000]))
    messages = pa.StructArray.from_arrays([pa.array(["user"] * count), content], ["role", "content"])
    rows = pa.ListArray.from_arrays(range(0, count + 1, 400), messages)
    parquet.write_table(pa.table({"messages": rows}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 2000
    with pytest.raises(ValidationError, match=r"to decode a\.parquet needs more than"):
        texts.read_held_out(tmp_path)

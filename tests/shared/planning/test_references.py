"""Keys of attempts and references of inputs are parsed as they are printed; malformed ones are refused."""

from __future__ import annotations

import pytest

from slipway.errors import ServiceError
from slipway.planning.references import AttemptKey, Output, Source, parse_reference, producers

EXPORT = "projects/research/exports/e-1"


def test_a_key_prints_what_it_was_read_from() -> None:
    key = AttemptKey.of(EXPORT, "quantize-onnx-int8", 12)
    assert key == f"{EXPORT}:quantize-onnx-int8:12"
    assert AttemptKey.parse(key) == key
    assert (key.export, key.project, key.task, key.attempt) == (EXPORT, "research", "quantize-onnx-int8", 12)
    assert AttemptKey.parse(f"{EXPORT}:m:007") == AttemptKey.of(EXPORT, "m", 7)


@pytest.mark.parametrize(
    "text",
    [
        "",
        EXPORT,
        f"{EXPORT}:m",
        f"{EXPORT}:m:",
        f"{EXPORT}:m:-1",
        f"{EXPORT}:m:²",
        f"{EXPORT}:m:1\n",
        f"{EXPORT}:m/n:1",
        f"{EXPORT}:m:{'9' * 5000}",
        f"{EXPORT}:{'m' * 101}:1",
        f"projects/../exports/e:{'m'}:1/",
        f"{EXPORT.upper()}:m:1",
        "projects/p/exports/e\x1b[2J:m:1",
    ],
)
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ServiceError) as refused:
        AttemptKey.parse(text)
    assert (refused.value.reason, refused.value.about) == ("REQUEST_INVALID", {"field": "task"})
    assert len(str(refused.value)) < 500
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize("reference", [Source("base"), Source("adapter-02"), Output("quantize-onnx-int8", "model")])
def test_a_reference_is_read_back_as_it_is_printed(reference: Source | Output) -> None:
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    "text",
    [
        "",
        "base",
        "source:",
        "source:a/b",
        "task:merge",
        "task:/pytorch",
        "task:merge/",
        "task:a/b/c",
        "other:x",
        "source:a\n",
        f"task:{'m' * 101}/x",
        f"source:{'n' * 100_000}",
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(ServiceError) as refused:
        parse_reference(text)
    assert refused.value.reason == "REQUEST_INVALID"
    assert len(str(refused.value)) < 500


def test_producers_are_named_once_in_the_order_of_the_inputs() -> None:
    inputs = {
        "base": "source:base",
        "onnx": "task:onnx_export/onnx",
        "pytorch": "task:merge/pytorch",
        "x": "task:merge/log",
    }
    assert producers(inputs) == ("onnx_export", "merge")

"""The base model of an export against the one the adapter names."""

from __future__ import annotations

import pytest

from slipway.cli.base_names import other_base


@pytest.mark.parametrize(
    ("used", "trained"),
    [
        ("demo/qwen3-base", "qwen3-base"),
        ("/models/Qwen3-4B/", "Qwen/Qwen3-4B"),
        ("Qwen/Qwen3-4B", "C:\\models\\qwen3-4b"),
        ("/cache/hub/models--Qwen--Qwen3-4B/snapshots/0f1e", "Qwen/Qwen3-4B"),
        ("s3://bucket/models/Qwen3-4B", "./Qwen3-4B"),
        ("sha256:0f1e", "Qwen/Qwen3-4B"),
        ("anything", ""),
        ("anything", None),
    ],
)
def test_same_name_wherever_it_lies_is_fine(used: str, trained: str | None) -> None:
    assert other_base(used, trained) == ()


@pytest.mark.parametrize("used", ["Qwen/Qwen3-4B-Instruct", "/cache/hub/models--Qwen--Qwen3-8B/snapshots/0f1e"])
def test_another_base_is_a_warning_that_names_both(used: str) -> None:
    (warning,) = other_base(used, "Qwen/Qwen3-4B")
    assert repr(used) in warning
    assert "'Qwen/Qwen3-4B'" in warning
    assert "base_model.name" in warning

"""An adapter beside the base that it names, and an empty Hugging Face cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models.matched_models import make_adapter, make_model


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A checkpoint of a run beside the base that it names."""
    make_model(tmp_path / "base")
    return make_adapter(tmp_path / "run" / "checkpoint-1")


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

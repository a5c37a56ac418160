"""A tokenizer that was saved without its chat template is read with the base's, as the merged model and the adapter have it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slipway_adapter.peft_folder import copy_tokenizer
from slipway_validate.protocol.messages import TextSpec
from slipway_validate.runner.texts import ReadTexts, write_texts
from support.models import tiny_models

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


@pytest.fixture(params=["among settings", "in a file"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    base = tiny_models.make_base(tmp_path / "base")
    for file in base.glob("chat_template*"):
        file.unlink()
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    if request.param == "in a file":
        (base / "chat_template.jinja").write_text(TEMPLATE)
    else:
        settings["chat_template"] = TEMPLATE
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    return base


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shutil.copy(base / "tokenizer.json", adapter)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (adapter / "tokenizer_config.json").write_text(json.dumps(settings))
    return adapter


def conversations(tokenizer: Path, base: Path, file: Path) -> list[str]:
    write_texts(TextSpec(tokenizer=tokenizer, base=base, file=file))
    return [each.prompt for each in ReadTexts.model_validate_json(file.read_bytes()).conversations]


def test_conversations_are_compared(base: Path, adapter: Path, tmp_path: Path) -> None:
    found = conversations(adapter, base, tmp_path / "own.json")
    assert found
    assert found == conversations(base, base, tmp_path / "base.json")
    assert not conversations(adapter, adapter, tmp_path / "none.json")


def test_an_adapter_that_is_delivered_unmerged_has_it(base: Path, adapter: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    assert "chat_template.jinja" in copy_tokenizer(adapter, base, output)
    assert (output / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((output / "tokenizer_config.json").read_text()) == json.loads(
        (adapter / "tokenizer_config.json").read_text()
    )


def test_a_template_alone_is_the_adapters_own(base: Path, tmp_path: Path) -> None:
    adapter, output = tmp_path / "template", tmp_path / "output"
    adapter.mkdir()
    output.mkdir()
    (adapter / "chat_template.jinja").write_text("tuned")
    assert "tokenizer.json" in copy_tokenizer(adapter, base, output)
    assert (output / "chat_template.jinja").read_text() == "tuned"

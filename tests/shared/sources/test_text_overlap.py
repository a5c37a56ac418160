"""Text for calibration that is held-out text, too, as the plan finds it before anything runs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts import LocalStore
from slipway.configuration import parse
from slipway.documents.separation import separate
from slipway.errors import ModelExportError, QuantizationError
from slipway.export_sources import text_files
from slipway.export_sources.text_files import check_apart
from slipway.settings import Settings
from slipway.sources import SourceFolders

INT4 = {"quantization": "int4", "method": "auto"}
SYSTEM = "You are a helpful assistant that was trained by people who wrote this long prompt for every conversation."


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[SourceFolders]:
    with SourceFolders(Settings.from_environment({"SLIPWAY_HOME": str(tmp_path / "home")})) as opened:
        yield opened


def warnings(folders: SourceFolders, calibration: Path, heldout: Path, *, named: bool = True, **changes: Any) -> Any:
    optimization = INT4 | ({"calibration": str(calibration)} if named else {}) | changes
    configuration = parse({"optimization": optimization, "validation": {"heldout": str(heldout)}})
    return check_apart(configuration, folders, calibration=calibration, heldout=heldout)


def conversations(path: Path, *numbers: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"messages": conversation(number)}) + "\n" for number in numbers))
    return path


def conversation(number: int) -> list[dict[str, str]]:
    draw = random.Random(number)
    said = " ".join("".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(150))
    told = (("system", SYSTEM), ("user", f"Please explain the topic of number {number} to me"), ("assistant", said))
    return [{"role": role, "content": content} for role, content in told]


def test_two_halves_of_a_split_are_apart(folders: SourceFolders, tmp_path: Path) -> None:
    train, held_out = (
        conversations(tmp_path / "train.jsonl", *range(40)),
        conversations(tmp_path / "eval.jsonl", *range(100, 110)),
    )
    assert warnings(folders, train, held_out) == ()


def test_what_was_apart_is_compared_again_only_if_a_byte_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.from_environment({"SLIPWAY_HOME": str(tmp_path / "home")})
    train, held_out = tmp_path / "train.jsonl", conversations(tmp_path / "eval.jsonl", *range(100, 110))
    compared: list[int] = []

    def count(*arguments: Any) -> Any:
        compared.append(1)
        return separate(*arguments)

    monkeypatch.setattr("slipway.documents.separation.separate", count)

    def said(*numbers: int) -> Any:
        """Compare as another command does: nothing but the store is the same."""
        with SourceFolders(settings, LocalStore(tmp_path / "store")) as folders:
            return warnings(folders, conversations(train, *numbers), held_out)

    assert said(*range(40)) == said(*range(40)) == ()
    assert len(compared) == 1
    for _ in range(2):  # what is in both texts is said every time
        assert "2 of 42 passages" in said(*range(40), 100, 101)[0]
    assert said(*range(1, 40)) == ()
    assert len(compared) == 4


@pytest.mark.parametrize("other", ["the same path", "a link", "a copy", "a copy among others"])
def test_the_same_file_for_both_is_refused(folders: SourceFolders, tmp_path: Path, other: str) -> None:
    train = held_out = conversations(tmp_path / "train.jsonl", *range(40))
    if other == "a link":
        held_out = tmp_path / "eval.jsonl"
        held_out.symlink_to(train)
    elif other != "the same path":
        held_out = conversations(tmp_path / "texts" / "eval.jsonl", *range(40))
    if other == "a copy among others":
        conversations(tmp_path / "texts" / "more.jsonl", *range(60, 70))
        held_out = tmp_path / "texts"
    with pytest.raises(QuantizationError, match="are the same text") as caught:
        warnings(folders, train, held_out)
    assert caught.value.reason == "CALIBRATION_OVERLAP"
    assert caught.value.remedy


def test_documents_of_both_are_named_until_too_few_are_left(folders: SourceFolders, tmp_path: Path) -> None:
    held_out = conversations(tmp_path / "eval.jsonl", *range(30, 60))
    (said,) = warnings(folders, conversations(tmp_path / "train.jsonl", *range(32)), held_out)
    assert "2 of 32 passages" in said
    assert said.endswith("train.jsonl, line 31, train.jsonl, line 32")
    with pytest.raises(QuantizationError, match=r"the others have nothing, and 1,024 tokens are needed") as caught:
        warnings(folders, conversations(tmp_path / "train.jsonl", *range(30, 50)), held_out)
    assert caught.value.reason == "CALIBRATION_OVERLAP"


def test_an_export_that_can_go_on_without_the_text_is_warned(folders: SourceFolders, tmp_path: Path) -> None:
    train = conversations(tmp_path / "calibration.jsonl", *range(40))
    for changes in ({"named": False}, {"method": "rtn"}):
        (said,) = warnings(folders, train, train, **changes)
        assert said.startswith("calibration will not use the text that it was given")
        assert "are the same text" in said


def test_text_that_cannot_be_read_is_refused_before_anything_runs(folders: SourceFolders, tmp_path: Path) -> None:
    good, bad = conversations(tmp_path / "good.jsonl", *range(40)), tmp_path / "bad.jsonl"
    bad.write_text('{"text": ')
    for pair, reason in (((bad, good), "CALIBRATION_DATA_INVALID"), ((good, bad), "VALIDATION_IMPOSSIBLE")):
        with pytest.raises(ModelExportError, match=r"bad\.jsonl, line 1 is not JSON") as caught:
            warnings(folders, *pair)
        assert caught.value.reason == reason


def test_a_client_without_the_libraries_compares_files_alone(
    folders: SourceFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "find_spec", lambda name: None)  # as in an installation of the client alone
    train, held_out = (
        conversations(tmp_path / "train.jsonl", *range(40)),
        conversations(tmp_path / "eval.jsonl", *range(39)),
    )
    assert warnings(folders, train, held_out) == ()
    with pytest.raises(QuantizationError, match="are the same text"):
        warnings(folders, train, train)

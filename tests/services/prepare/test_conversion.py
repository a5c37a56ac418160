"""``slipway convert``: what it writes is what was pickled, bit for bit; what it cannot take is refused by name, and nothing is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from slipway.errors import CheckpointValidationError
from slipway.model.weights.conversion import Conversion
from slipway.stage import Context
from slipway_prepare.conversion.stage import CONVERSION
from slipway_prepare.params import ConvertParams
from support.commands.cli import in_process
from support.models.prepare_models import loads, pickled

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.tensor([1, 2], dtype=torch.int32)}


def convert(source: Path, tmp_path: Path, **params: Any) -> tuple[Path, Conversion]:
    work = tmp_path / "work"
    work.mkdir()
    out = CONVERSION.run({"source": source}, ConvertParams(**params), Context(workdir=work))["converted"]
    return out, Conversion.read(out)


def saved(folder: Path, name: str, value: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(value, folder / name)
    return folder


def refusal(source: Path, tmp_path: Path, **params: Any) -> CheckpointValidationError:
    with pytest.raises(CheckpointValidationError) as caught:
        convert(source, tmp_path, **params)
    assert caught.value.remedy
    return caught.value


def test_a_model_becomes_what_transformers_saves(dense: Path, tmp_path: Path) -> None:
    out, found = convert(pickled(dense, tmp_path), tmp_path)
    expected, made = load_file(dense / "model.safetensors"), load_file(out / "model.safetensors")
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    (one,) = found.weights
    assert (one.source, one.target, one.ties) == ("pytorch_model.bin", "model.safetensors", ("lm_head.weight",))
    assert (out / "tokenizer.json").is_file()
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["source"] == "pytorch_model.bin"
    loads(out)


def test_shards_keep_their_files_and_get_an_index(dense: Path, tmp_path: Path) -> None:
    out, found = convert(pickled(dense, tmp_path, shards=2, tie=False), tmp_path)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model-0.safetensors", "model-1.safetensors"}
    assert found.weights[0].files == 2
    loads(out)


def test_a_tree_of_models_adapters_and_files(dense: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    saved(tree / "lora", "adapter_model.bin", WEIGHTS)
    (tree / "lora" / "adapter_config.json").write_text("{}")
    saved(tree / "lora", "optimizer.pt", {"state": {}})
    saved(tree, "trained.ckpt", {"epoch": 3, "state_dict": WEIGHTS})
    saved(tree / "same", "a.bin", WEIGHTS)
    saved(tree / "same", "a.pt", {"b": torch.ones(1)})
    (tree / "done").mkdir()
    (tree / "done" / "model.safetensors").write_bytes((dense / "model.safetensors").read_bytes())
    saved(tree / "done", "pytorch_model.bin", WEIGHTS)
    (tree / "broken.pt").write_bytes(b"\x80\x02}q\x00.")
    out, found = convert(tree, tmp_path)
    assert {one.source: one.target for one in found.weights} == {
        "lora/adapter_model.bin": "lora/adapter_model.safetensors",
        "trained.ckpt": "trained.safetensors",
        "same/a.bin": "same/a.safetensors",
        "same/a.pt": "same/a.pt.safetensors",
        "broken.pt": "",
    }
    assert {one.source: one.reason for one in found.weights if one.reason} == {"broken.pt": "BASE_MODEL_INVALID"}
    assert {one.source for one in found.skipped} == {"done/pytorch_model.bin", "lora/optimizer.pt"}
    made = load_file(out / "trained.safetensors")
    assert all(torch.equal(made[name], WEIGHTS[name]) for name in WEIGHTS)
    assert next(one for one in found.weights if one.source == "trained.ckpt").left_out == ("epoch",)
    assert (out / "lora" / "adapter_config.json").is_file()


def test_what_is_wrong_with_one_model_keeps_no_other_from_being_converted(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    saved(tree / "both", "model.pt", {"b": torch.ones(1)})
    saved(tree / "both", "pytorch_model.bin", WEIGHTS)
    saved(tree / "parts", "pytorch_model-00001-of-00002.bin", WEIGHTS)
    saved(tree / "index", "pytorch_model-00001-of-00001.bin", WEIGHTS)
    (tree / "index" / "pytorch_model.bin.index.json").write_text("[")
    out, found = convert(tree, tmp_path)
    assert load_file(out / "both" / "model.safetensors").keys() == WEIGHTS.keys()
    assert load_file(out / "both" / "model.pt.safetensors").keys() == {"b"}
    refused = {one.source: one.reason for one in found.weights if one.reason}
    assert refused == {
        "parts/pytorch_model-00001-of-00002.bin": "BASE_MODEL_INVALID",
        "index/pytorch_model.bin.index.json": "BASE_MODEL_INVALID",
    }
    assert sorted(path.name for path in out.rglob("*.safetensors")) == ["model.pt.safetensors", "model.safetensors"]


def test_a_file_with_several_sets_of_tensors_needs_a_key(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "both.pt", {"model": WEIGHTS, "average": {"b": torch.zeros(2)}})
    assert "average, model" in str(refusal(source, tmp_path))
    (tmp_path / "again").mkdir()
    out, _ = convert(source, tmp_path / "again", key="average")
    assert load_file(out / "both.safetensors").keys() == {"b"}


def test_tensors_that_share_memory_without_a_tie_are_written_each(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    out, found = convert(saved(tmp_path / "source", "w.pt", {"a": shared, "b": shared}), tmp_path)
    assert load_file(out / "w.safetensors").keys() == {"a", "b"}
    assert found.weights[0].ties == ()


class Runs:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_code_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    error = refusal(saved(tmp_path / "source", "evil.pt", {"a": torch.ones(1), "b": Runs(mark)}), tmp_path)
    assert error.reason == "UNSAFE_PICKLE"
    assert not mark.exists()


STORED = torch.zeros(1000)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"a": torch.ones(2, 2).to_sparse()}, "layout"),
        ({"a": torch.zeros(1).expand(1 << 20)}, "larger than the file"),
        ({"a": STORED[:1000], "b": STORED[1:], "c": STORED[2:]}, "overlap"),
        (dict.fromkeys("abcdefgh", STORED), "overlap"),
        ({"a": torch.ones(1), "b\ud83d": torch.ones(1)}, "'b\\ud83d'"),
        ({"a": torch.ones(1), "__metadata__": torch.ones(1)}, "'__metadata__'"),
        ({"epoch": 3}, "no tensors"),
        ([torch.ones(1)], "instead of a dictionary"),
        ({1: torch.ones(1)}, "1 in"),
    ],
    ids=["complex", "sparse", "expanded", "views", "names", "half", "metadata", "no tensors", "list", "number"],
)
def test_what_safetensors_cannot_hold_is_refused(value: Any, said: str, tmp_path: Path) -> None:
    assert said in str(refusal(saved(tmp_path / "source", "w.pt", value), tmp_path))


def test_one_bad_name_keeps_no_other_file_from_being_converted(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "good.pt", WEIGHTS)
    for number, name in enumerate(("a\udc00", "__metadata__")):
        saved(source, f"bad-{number}.pt", {name: torch.ones(2)})
    results = convert(source, tmp_path)[1].weights
    assert [(one.reason, one.target) for one in results] == [
        ("BASE_MODEL_INVALID", ""),
        ("BASE_MODEL_INVALID", ""),
        ("", "good.safetensors"),
    ]


def test_a_folder_without_pickles_is_refused(dense: Path, tmp_path: Path) -> None:
    assert refusal(dense, tmp_path).reason == "CHECKPOINT_INCOMPLETE"


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    home, source = tmp_path / "home", saved(tmp_path / "source", "w.pt", WEIGHTS)
    (source / "other.bin").write_bytes(b"no pickle")
    done = in_process(capfd, "convert", source, "--out", tmp_path / "out", "--json", home=home)
    assert done.code == 3
    assert [one["target"] for one in done.json["weights"]] == ["", "w.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["conversion.json", "w.safetensors"]
    done = in_process(capfd, "convert", source / "w.pt", "--out", tmp_path / "one", home=home)
    assert done.code == 0
    assert "w.safetensors" in done.out
    again = in_process(capfd, "convert", source, "--out", tmp_path / "one", home=home)
    assert (again.code, "OUTPUT_EXISTS" in again.err) == (3, True)
    missing = in_process(capfd, "convert", tmp_path / "none", "--out", tmp_path / "two", home=home)
    assert missing.code == 3
    assert not (tmp_path / "two").exists()

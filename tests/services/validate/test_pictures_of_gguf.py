"""GGUF files of models that take images are compared behind pictures, through llama.cpp's own code for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from slipway.proof.runtime import NotRunnable, Unusable
from slipway.proof.sights import read_sights
from slipway.stage import Context
from slipway.validation.findings import OutputValidation
from slipway.validation.pictures import PictureComparison
from slipway.validation.verdicts import Answer
from slipway_gguf.files import projector_files
from slipway_gguf.runtime.model import load
from slipway_gguf.runtime.pictures import find_projector
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE as MERGE
from slipway_validate.judging import pictures
from support.models.gguf_models import write_gguf
from support.models.image_models import KINDS
from support.models.pictured_kinds import make_pictured_kind
from support.models.validated_here import Validated

pytestmark = pytest.mark.own_process
FAST = ("qwen3-vl", "mistral3")


class Files:
    """The merged model of a kind, and judged outputs of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.kind = make_pictured_kind(name, folder / "kind", dtype=torch.bfloat16)
        (folder / "merged").mkdir()
        inputs = {"base": self.kind.base, "adapter": self.kind.adapter}
        self.merged = MERGE.run(inputs, MergeParams(), Context(workdir=folder / "merged"))["pytorch"]

    def write(self, level: str = "f16") -> Path:
        return write_gguf(self.merged, self.folder / f"work-{level}", level=level)[0].parent

    def judge(self, **outputs: Path) -> dict[str, OutputValidation]:
        work = self.folder / "judged"
        work.mkdir()
        named = {"pytorch": self.merged, **{name.replace("_", "-", 1): folder for name, folder in outputs.items()}}
        self.run = Validated(self.kind.base, self.kind.adapter, work, merged=self.merged)
        self.run.read_weights(named)
        return {name: self.run.output(name, folder) for name, folder in named.items()}


def behind(verdict: OutputValidation) -> PictureComparison:
    assert verdict.pictures is not None
    return verdict.pictures


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_right_files_pass_behind_pictures(name: str, tmp_path: Path) -> None:
    """Also by the noise that is measured: a picture's rounding to float16 explains the distance."""
    files = Files(name, tmp_path)
    verdicts = files.judge(gguf=files.write(), gguf_q8_0=files.write("q8_0"))
    for verdict in verdicts.values():
        found = behind(verdict)
        assert verdict.passed, verdict.explanation
        assert not found.not_run
        assert found.kept is not None
        assert found.kept > 0.95
    if "moe" not in name:
        assert all(behind(each).faithful.answer is Answer.PASSED for each in verdicts.values())


def test_faults_of_the_file_for_images_fail_by_name(tmp_path: Path) -> None:
    files = Files("qwen3-vl", tmp_path)
    right = files.write()
    planted = {}
    for fault, change in (("lost", lose), ("scaled", scale), ("swapped", exchange), ("dropped", drop)):
        planted[f"gguf_{fault}"] = folder = tmp_path / fault
        shutil.copytree(right, folder)
        change(folder, files)
    verdicts = files.judge(gguf=right, **planted)
    assert verdicts["gguf"].passed
    for fault in ("lost", "scaled", "swapped"):
        verdict = verdicts[f"gguf-{fault}"]
        assert {each.name for each in verdict.failed_checks} == {"pictures.mean_kl"}, fault
        assert pictures.CAUSES["pictures"] in verdict.explanation
        assert behind(verdict).faithful.answer is Answer.FAILED
    dropped = verdicts["gguf-dropped"]
    assert {each.name for each in dropped.failed_checks} == {"pictures.unreadable"}
    assert "its file for images, tiny-mmproj-F16.gguf, which gguf.json names, is not there" in dropped.explanation


def _tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change tensors of an ``mmproj`` file in place."""
    reader = gguf.GGUFReader(projector_files(folder)[0], "r+")
    change({each.name: each.data for each in reader.tensors})
    for each in reader.tensors:
        each.data.flush()


def lose(folder: Path, files: Files) -> None:
    """Give a matrix the values that it has without the adapter."""
    plain = write_gguf(files.kind.base, folder.with_name("base-file"))[0].parent
    before = {each.name: np.array(each.data) for each in gguf.GGUFReader(projector_files(plain)[0]).tensors}

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["v.blk.1.ffn_up.weight"][:] = before["v.blk.1.ffn_up.weight"]

    _tensors(folder, change)


def scale(folder: Path, _: Files) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["mm.2.weight"][:] = (tensors["mm.2.weight"].astype(np.float32) * 1.05).astype(np.float16)

    _tensors(folder, change)


def exchange(folder: Path, _: Files) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith("v.blk.0.")]:
            other = name.replace("v.blk.0.", "v.blk.1.")
            kept = np.array(tensors[name])
            tensors[name][:], tensors[other][:] = tensors[other], kept

    _tensors(folder, change)


def drop(folder: Path, _: Files) -> None:
    projector_files(folder)[0].unlink()


def test_what_llama_cpp_computes_otherwise_is_named_and_not_condemned(tmp_path: Path) -> None:
    files = Files("qwen3-vl", tmp_path)
    folder = files.write()
    facts = json.loads((folder / "gguf.json").read_text())
    (folder / "gguf.json").write_text(json.dumps(facts | {"images": facts["images"] | {"differs": "it sees later"}}))
    other = tmp_path / "text"
    shutil.copytree(folder, other)
    drop(other, files)
    (other / "gguf.json").write_text(json.dumps({key: value for key, value in facts.items() if key != "images"}))
    verdicts = files.judge(gguf=folder, gguf_text=other)
    assert all(each.passed for each in verdicts.values())
    assert "llama.cpp computes images otherwise than the model: it sees later" in behind(verdicts["gguf"]).not_run
    assert "has no file for images (mmproj)" in behind(verdicts["gguf-text"]).not_run


def test_pictures_that_llama_cpp_would_see_otherwise_are_not_run(tmp_path: Path) -> None:
    files = Files("qwen3-vl", tmp_path)
    folder = files.write()
    files.judge()
    sight = read_sights(tmp_path / "judged" / "samples")[0]
    model = load(folder, threads=1)
    model.prepare_comparison()
    with pytest.raises(NotRunnable, match="names no image_mean and image_std"):
        model.look(replace(sight, colours_known=False))
    with pytest.raises(NotRunnable, match=r"makes 32 tokens of a picture of which the model makes 24"):
        model.look(replace(sight, pixels=np.zeros((32, 64, 3), np.uint8)))
    before = model.look(sight)
    assert np.array_equal(model.look(sight), before)


def test_a_damaged_file_for_images_is_unusable(tmp_path: Path) -> None:
    files = Files("qwen3-vl", tmp_path)
    folder = files.write()
    projector_files(folder)[0].write_bytes(b"GGUF" + bytes(60))
    files.judge()
    [sight, *_] = read_sights(tmp_path / "judged" / "samples")
    model = load(folder, threads=1)
    with pytest.raises(Unusable, match=r"cannot load tiny-mmproj-F16\.gguf beside the text"):
        model.look(sight)
    with pytest.raises(NotRunnable, match="has no file for images"):
        find_projector(tmp_path)

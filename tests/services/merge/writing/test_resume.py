"""Interrupted merges go on with the shards that were finished, and with no others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from slipway.artifacts import LocalStore
from slipway.errors import ModelMergeError
from slipway.execution.runner import TaskResult, TaskRunner
from slipway.stage import Context, Progress
from slipway.stage_call import Limits, StageCall
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from support.models.merge_cases import Case, randomise

PARAMS = {"max_shard_bytes": 15_000}
SHARDS = 4


def merge(case: Case, name: str, kept: Path | None, *, on_progress: Any = None, **params: Any) -> tuple[Path, Context]:
    workdir = case.workdir / name
    workdir.mkdir()
    if kept is not None:
        kept.mkdir(exist_ok=True)
    ctx = Context(workdir=workdir, kept=kept, threads=2)
    if on_progress is not None:
        ctx.on_progress = on_progress
    asked = MergeParams(**{**PARAMS, "verify": "spot", **params})
    return STAGE.run({"base": case.base, "adapter": case.adapter}, asked, ctx)["pytorch"], ctx


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def same_but_for_resumption(first: Context, second: Context) -> bool:
    facts = [{key: value for key, value in ctx.facts.items() if key != "shards_resumed"} for ctx in (first, second)]
    digests = [{path.name: digest for path, digest in ctx.digests.items()} for ctx in (first, second)]
    return facts[0] == facts[1] and digests[0] == digests[1]


@pytest.fixture
def case(make_case: Callable[..., Case]) -> Case:
    return make_case("llama", torch.bfloat16, target_modules=["q_proj", "up_proj"])


def test_finished_shards_are_taken_as_they_are(case: Case, tmp_path: Path) -> None:
    first, undisturbed = merge(case, "first", tmp_path / "kept")
    inodes = {path.name: path.stat().st_ino for path in first.glob("*.safetensors")}
    assert len(inodes) == SHARDS
    assert undisturbed.facts["shards_resumed"] == 0
    expected = content(first)
    shutil.rmtree(first)
    again, resumed = merge(case, "again", tmp_path / "kept")
    assert {path.name: path.stat().st_ino for path in again.glob("*.safetensors")} == inodes
    assert resumed.facts["shards_resumed"] == len(inodes)
    assert content(again) == expected
    assert same_but_for_resumption(undisturbed, resumed)


def flip(path: Path) -> None:
    """One bit of the last byte, in place."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def cut(path: Path) -> None:
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size - 7)


def edit(path: Path, **changes: object) -> None:
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, **changes}))


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "a bit of the shard": lambda shard, record: flip(shard),
    "a shard cut short": lambda shard, record: cut(shard),
    "no shard": lambda shard, record: shard.unlink(),
    "another shard in its place": lambda shard, record: shard.write_bytes(bytes(shard.stat().st_size)),
    "no record": lambda shard, record: record.unlink(),
    "half a record": lambda shard, record: record.write_bytes(record.read_bytes()[:100]),
    "an empty record": lambda shard, record: record.write_bytes(b""),
    "a record of another plan": lambda shard, record: edit(record, identity="0" * 64),
    "a record of another digest": lambda shard, record: edit(record, sha256="0" * 64),
    "a record without accounting": lambda shard, record: edit(record, written={"changes": [{"module": 3}]}),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_what_is_not_as_it_was_finished_is_made_again(case: Case, tmp_path: Path, damage: str) -> None:
    first, undisturbed = merge(case, "first", tmp_path / "kept")
    expected = content(first)
    shutil.rmtree(first)
    shard = tmp_path / "kept" / f"model-00002-of-{SHARDS:05}.safetensors"
    shard.chmod(0o644)
    DAMAGE[damage](shard, shard.with_name(f"{shard.name}.json"))
    again, resumed = merge(case, "again", tmp_path / "kept")
    assert resumed.facts["shards_resumed"] == SHARDS - 1
    assert content(again) == expected
    assert same_but_for_resumption(undisturbed, resumed)
    last, _ = merge(case, "last", tmp_path / "kept")  # the remade shard was kept in place of the wrong one
    assert content(last) == expected


@pytest.mark.parametrize("params", [{"dtype": "float32"}, {"max_shard_bytes": 20_000}, {"dtype": "float16"}])
def test_shards_of_another_plan_are_not_taken(case: Case, tmp_path: Path, params: dict[str, Any]) -> None:
    merge(case, "other", tmp_path / "kept", **params)
    fresh, undisturbed = merge(case, "fresh", None)
    again, resumed = merge(case, "again", tmp_path / "kept")
    assert content(again) == content(fresh)
    assert resumed.facts["shards_resumed"] == 0
    assert same_but_for_resumption(undisturbed, resumed)


def test_another_scaling_is_another_plan(make_case: Callable[..., Case], tmp_path: Path) -> None:
    case = make_case("llama", torch.bfloat16, target_modules="model.layers.0.self_attn.q_proj")
    merge(case, "other", tmp_path / "kept")
    config = case.adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 11}))
    fresh, _ = merge(case, "fresh", None)
    again, resumed = merge(case, "again", tmp_path / "kept")
    assert content(again) == content(fresh)
    changed = json.loads((fresh / "model.safetensors.index.json").read_text())["weight_map"]
    touched = {shard for name, shard in changed.items() if "layers.0.self_attn.q_proj" in name}
    assert resumed.facts["shards_resumed"] == SHARDS - len(touched) > 0


def test_a_shard_that_was_not_finished_is_not_kept(case: Case, tmp_path: Path) -> None:
    """The adapter overflows in the last layer: what came before it was finished."""
    from safetensors.torch import load_file, save_file

    weights = load_file(case.adapter / "adapter_model.safetensors")
    bad = sorted(name for name in weights if "layers.1" in name and "up_proj.lora_B" in name)
    weights[bad[0]] *= float("inf")
    save_file(weights, case.adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelMergeError, match="NaN or infinity"):
        merge(case, "first", tmp_path / "kept")
    kept = sorted(path.name for path in (tmp_path / "kept").glob("*.safetensors"))
    assert kept == sorted(path.name.removesuffix(".json") for path in (tmp_path / "kept").glob("*.json"))
    assert 0 < len(kept) < SHARDS


def test_disk_use_is_that_of_one_model(case: Case, tmp_path: Path) -> None:
    out, _ = merge(case, "first", tmp_path / "kept")
    kept = tmp_path / "kept"
    for path in out.glob("*.safetensors"):
        assert path.samefile(kept / path.name)
        assert path.stat().st_mode & 0o222 == 0, "a file with two names is not for writing"


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some sixty shards of a megabyte, which take long enough to be interrupted."""
    root = tmp_path_factory.mktemp("larger")
    torch.manual_seed(5)
    config = tf.LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=8
    )
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(root / "base")
    tuned = get_peft_model(model, LoraConfig(r=8, lora_alpha=12, target_modules="all-linear"))
    randomise(tuned)
    tuned.save_pretrained(root / "adapter")
    return root


RUN = """
import asyncio, json, sys
from pathlib import Path
from slipway.artifacts import LocalStore
from slipway.execution.runner import TaskRunner
from slipway.stage_call import Limits, StageCall
root, models = Path(sys.argv[1]), Path(sys.argv[2])
store = LocalStore(root / "store")
inputs = {name: store.put_files({p.name: p for p in (models / name).iterdir()}) for name in ("base", "adapter")}
spec = StageCall("merge", {"max_shard_bytes": 1_000_000, "verify": "spot"}, inputs)
result = asyncio.run(TaskRunner(store, root / "scratch").run(spec))
reason = result.failure.reason if result.failure else None
print(json.dumps({"reason": reason, "outputs": result.outputs, "facts": result.facts}))
"""


def start(root: Path, models: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RUN, str(root), str(models)], stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=250)
    document: dict[str, Any] = json.loads(out)
    return document


def finished(scratch: Path) -> dict[str, tuple[int, int]]:
    """Inode and modification time of the shards that have their record."""
    records = scratch.glob(".merge.slipway-kept-*/*.json")
    shards = [path.with_name(path.name.removesuffix(".json")) for path in records]
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in shards}


def kill_in_the_middle(folder: Path, models: Path, *, command: bool) -> tuple[Path, dict[str, tuple[int, int]]]:
    """The root of a merge that was killed when some of its shards were finished, and these; the command or its child.

    On a busy machine the kill may come when all is done.
    """
    for number in range(30):
        root = folder / str(number)
        process, children, reason = start(root, models), [], ""
        while process.poll() is None and len(finished(root / "scratch")) < 5:
            time.sleep(0.001)
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(process.pid).children(recursive=True)
            child = next((one for one in children if "slipway.execution.child_main" in one.cmdline()), process)
            (process if command else child).kill()
        if command:
            process.communicate()
        else:
            reason = answer(process)["reason"]
        assert psutil.wait_procs(children, timeout=60)[1] == []
        before = finished(root / "scratch")
        if 5 <= len(before) < 40:
            assert reason == ("" if command else "STAGE_KILLED")
            return root, before
    raise AssertionError("every kill came too late")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, larger: Path) -> dict[str, Any]:
    """The answer of a merge of it that nothing interrupted."""
    found = answer(start(tmp_path_factory.mktemp("undisturbed"), larger))
    assert found["reason"] is None
    assert found["facts"].pop("shards_resumed") == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["command", "child"])
def test_kill_in_the_middle_and_the_same_command_again(
    tmp_path: Path, larger: Path, undisturbed: dict[str, Any], killed: str
) -> None:
    root, before = kill_in_the_middle(tmp_path / "killed", larger, command=killed == "command")
    again = answer(start(root, larger))
    assert again["reason"] is None
    resumed = again["facts"].pop("shards_resumed")
    assert len(before) - 1 <= resumed <= len(before), "the last record may have been half-written"
    assert again == undisturbed
    assert list((root / "scratch").iterdir()) == []
    stats = [path.stat() for path in (root / "store" / "blobs").rglob("*")]
    taken = [stat for stat in stats if (stat.st_ino, stat.st_mtime_ns) in before.values()]
    assert len(taken) == resumed
    assert {(stat.st_mode & 0o777, stat.st_nlink) for stat in taken} == {(0o444, 1)}


@pytest.mark.slow
def test_cancelled_and_timed_out_merges_go_on(tmp_path: Path, larger: Path) -> None:
    params = {"max_shard_bytes": 1_000_000, "verify": "spot"}

    async def cancelled() -> bool:
        begun = asyncio.Event()

        def look(progress: Progress, _: int) -> None:
            if progress.phase == "merge" and progress.done > 5_000_000:
                begun.set()

        task = asyncio.ensure_future(runner.run(StageCall("merge", params, inputs), on_progress=look))
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    for number in range(30):  # on a busy machine the merge may have ended before its cancellation
        store, scratch = LocalStore(tmp_path / f"store-{number}"), tmp_path / f"scratch-{number}"
        inputs = {name: store.put_files({p.name: p for p in (larger / name).iterdir()}) for name in ("base", "adapter")}
        runner = TaskRunner(store, scratch)
        if asyncio.run(cancelled()):
            break
    first = finished(scratch)
    assert first
    late = asyncio.run(runner.run(StageCall("merge", params, inputs, Limits(timeout_seconds=0.05))))
    assert late.failure is not None
    assert late.failure.reason == "STAGE_TIMEOUT"
    assert finished(scratch).keys() >= first.keys()
    result: TaskResult = asyncio.run(runner.run(StageCall("merge", params, inputs)))
    assert result.failure is None
    assert result.facts["shards_resumed"] >= len(first)
    assert list(scratch.iterdir()) == []

"""A merge in parts: the joined model has the bytes and facts of one merge, and the join proves that nothing is missing or there twice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipway.artifacts import LocalStore
from slipway.artifacts.adopting import place_adopted
from slipway.division import input_names, step_of
from slipway.errors import ModelExportError, ModelMergeError
from slipway.execution.runner import TaskResult, TaskRunner
from slipway.model.weights.divided_files import RECORD
from slipway.stage import Context
from slipway.stage_call import StageCall
from slipway_merge.stage import STAGE
from support.models.merge_cases import Case

PARTS = 3
PARAMS: dict[str, Any] = {"max_shard_bytes": 15_000, "verify": "spot"}
CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "lora": ("llama", torch.bfloat16, {"target_modules": ["q_proj", "up_proj"]}),
    "replaced head": ("llama", torch.float32, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tied": ("gpt2", torch.float32, {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}),
    "rows": ("llama", torch.float32, {"target_modules": ["v_proj"], "trainable_token_indices": [1, 5]}),
    "dora": ("llama", torch.float32, {"target_modules": ["v_proj"], "use_dora": True}),
}


def step(case: Case, name: str, inputs: dict[str, Path], **params: Any) -> tuple[Path, Context]:
    """Run one task of the divided merge; its inputs have all files, as on plain folders."""
    ctx = Context(workdir=case.workdir / name, threads=2)
    ctx.workdir.mkdir()
    call = StageCall("merge", {**PARAMS, **params}, {key: str(path) for key, path in inputs.items()})
    stage = call.step(STAGE)
    folder = stage.run(inputs, call.check(stage), ctx)[stage.main_output]
    place_adopted(folder, inputs, ctx.adopted)
    return folder, ctx


_ALONE = """
import json, sys
from pathlib import Path
from slipway.stage import Context
from slipway.stage_call import StageCall
from slipway_merge.stage import STAGE
base, adapter, workdir, params = *map(Path, sys.argv[1:4]), json.loads(sys.argv[4])
call = StageCall("merge", params, {"base": str(base), "adapter": str(adapter)})
stage = call.step(STAGE)
stage.run({"base": base, "adapter": adapter}, call.check(stage), Context(workdir=workdir, threads=2))
print(json.dumps(sorted({"torch", "transformers", "peft", "onnx_ir", "scipy"} & sys.modules.keys())))
"""
"""A task in a process of its own, which says what it has imported."""


def parts_of(case: Case, **params: Any) -> dict[str, Path]:
    inputs = {"base": case.base, "adapter": case.adapter}
    made = (step(case, f"part-{n}", inputs, parts=PARTS, part=n, **params)[0] for n in range(1, PARTS + 1))
    return dict(zip(input_names(PARTS), made, strict=True))


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("lora", "stored"),
        ("lora", "deferred"),
        ("replaced head", "stored"),
        *(
            pytest.param(kind, weights, marks=pytest.mark.slow)
            for kind in ("replaced head", "tied", "rows", "dora")
            for weights in ("stored", "deferred")
            if (kind, weights) != ("replaced head", "stored")
        ),
    ],
)
def test_joined_parts_are_the_whole(make_case: Callable[..., Case], kind: str, weights: str) -> None:
    name, dtype, lora = CASES[kind]
    case = make_case(name, dtype, **lora)
    whole, once = step(case, "whole", {"base": case.base, "adapter": case.adapter}, weights=weights)
    joined, ctx = step(case, "joined", parts_of(case, weights=weights), parts=PARTS, weights=weights)
    assert content(joined) == content(whole)
    assert ctx.facts == once.facts
    if once.facts["weights"] == "stored":
        assert sum(name.endswith(".safetensors") for name in content(whole)) >= PARTS


def test_more_parts_than_files(make_case: Callable[..., Case]) -> None:
    case = make_case("llama", torch.float32, target_modules=["q_proj"])
    large = {"max_shard_bytes": 1 << 30}
    whole, once = step(case, "whole", {"base": case.base, "adapter": case.adapter}, **large)
    joined, ctx = step(case, "joined", parts_of(case, **large), parts=PARTS, **large)
    assert content(joined) == content(whole)
    assert ctx.facts == once.facts


def run(runner: TaskRunner, inputs: dict[str, str], **params: Any) -> TaskResult:
    result = asyncio.run(runner.run(StageCall("merge", {**PARAMS, **params}, inputs)))
    assert result.failure is None, result.failure
    return result


@pytest.mark.slow
def test_a_store_gets_the_weights_once(make_case: Callable[..., Case], tmp_path: Path) -> None:
    name, dtype, lora = CASES["lora"]
    case = make_case(name, dtype, **lora)
    stores = {name: LocalStore(tmp_path / name) for name in ("whole", "parts")}
    results = {}
    for kind, store in stores.items():
        runner = TaskRunner(store, tmp_path / f"scratch-{kind}")
        sources = {
            each: store.put_files({p.name: p for p in folder.iterdir()})
            for each, folder in (("base", case.base), ("adapter", case.adapter))
        }
        if kind == "whole":
            results[kind] = run(runner, sources)
            continue
        made = [run(runner, sources, parts=PARTS, part=n).outputs["part"] for n in range(1, PARTS + 1)]
        blobs = {path: path.stat() for path in (store.root / "blobs").rglob("*") if path.is_file()}
        results[kind] = run(runner, dict(zip(input_names(PARTS), made, strict=True)), parts=PARTS)
        weights = [
            file for file in store.manifest(results[kind].outputs["pytorch"]).files if "safetensors" in file.path
        ]
        for file in weights:
            if file.path.endswith(".safetensors"):
                before, now = blobs[store.blob_path(file.digest)], store.blob_path(file.digest).stat()
                assert (before.st_ino, before.st_ctime_ns) == (now.st_ino, now.st_ctime_ns), "not even linked"
        assert run(runner, sources, parts=PARTS, part=2).reused
    assert results["parts"].outputs == results["whole"].outputs, "one artifact, whichever way it was made"
    assert results["parts"].facts == results["whole"].facts


def alter(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def altered(part: Path) -> None:
        record = json.loads((part / RECORD).read_text())
        change(record)
        (part / RECORD).write_text(json.dumps(record))

    return altered


def drop_file(record: dict[str, Any]) -> None:
    record["written"].popitem()


def use_again(record: dict[str, Any]) -> None:
    record["used"].append(record["used"][0])


def lose_use(record: dict[str, Any]) -> None:
    name = record["used"][0][0]
    record["used"] = [pair for pair in record["used"] if pair[0] != name]


def other_plan(record: dict[str, Any]) -> None:
    record["plan"][0]["identity"] = "0" * 64


def other_adapter(record: dict[str, Any]) -> None:
    record["adapter"].append("stranger")


def other_facts(record: dict[str, Any]) -> None:
    record["facts"]["vocab_size"] = 7


def check_less(record: dict[str, Any]) -> None:
    record["results"]["verified"]["tensors"] -= 1


def be_another(record: dict[str, Any]) -> None:
    record["part"] = 1


@pytest.mark.parametrize(
    ("change", "reason", "said"),
    [
        (drop_file, "PARTS_DIFFER", "they wrote"),
        (use_again, "MERGE_NOT_VERIFIED", "was used twice"),
        (lose_use, "MERGE_NOT_VERIFIED", "no part used"),
        (other_plan, "PARTS_DIFFER", "another plan"),
        (other_adapter, "PARTS_DIFFER", "another adapter"),
        (check_less, "MERGE_NOT_VERIFIED", "checked"),
        (be_another, "PARTS_DIFFER", "is part 1 of 3"),
        (other_facts, "PARTS_DIFFER", "another vocab_size"),
    ],
)
def test_the_join_refuses(
    make_case: Callable[..., Case], change: Callable[[dict[str, Any]], None], reason: str, said: str
) -> None:
    case = make_case("llama", torch.bfloat16, target_modules=["q_proj", "up_proj"])
    parts = parts_of(case)
    alter(change)(parts["part-002"])
    with pytest.raises(ModelExportError, match=said) as refused:
        step(case, "joined", parts, parts=PARTS)
    assert refused.value.reason == reason


def test_an_update_that_vanishes_everywhere_is_refused_by_the_join_alone(make_case: Callable[..., Case]) -> None:
    case = make_case("llama", torch.float32, target_modules=["q_proj"])
    lost = {"dtype": "bfloat16"}
    import safetensors.torch as st

    path = case.adapter / "adapter_model.safetensors"
    st.save_file({name: value * 1e-12 for name, value in st.load_file(path).items()}, path)
    parts = parts_of(case, **lost)
    with pytest.raises(ModelMergeError) as refused:
        step(case, "joined", parts, parts=PARTS, **lost)
    assert refused.value.reason == "ADAPTER_NO_EFFECT"


def test_a_part_has_a_key_and_a_progress_of_its_own() -> None:
    whole = step_of(STAGE, {})
    assert whole is STAGE
    part = step_of(STAGE, {"parts": 2, "part": 1})
    assert (part.name, part.inputs, part.outputs) == ("merge", ("base", "adapter"), ("part",))
    join = step_of(STAGE, {"parts": 2})
    assert (join.inputs, join.outputs) == (("part-001", "part-002"), ("pytorch",))
    assert join.adopts == ("model.safetensors", "model-?????-of-?????.safetensors")


def test_a_part_of_plain_lora_loads_no_torch(make_case: Callable[..., Case], tmp_path: Path) -> None:
    """Also where a weight is square, and could be one that is stored transposed."""
    case = make_case("llama", torch.bfloat16, target_modules="all-linear")
    params = {**PARAMS, "parts": PARTS, "part": 2}
    command = [sys.executable, "-c", _ALONE, *map(str, (case.base, case.adapter, tmp_path)), json.dumps(params)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
    made, _ = step(case, "here", {"base": case.base, "adapter": case.adapter}, **params)
    assert content(tmp_path / "part") == content(made)

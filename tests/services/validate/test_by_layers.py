"""A decoder that does not fit into memory is computed layer by layer: with the results of one that does, and in the memory of a layer."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from slipway.model.pytorch import joined_weights
from slipway.model.pytorch.block_passes import BlockPasses, find_blocks
from slipway.proof import transformers_runtime
from slipway.proof.numerics import Logits
from slipway.proof.runtime import Samples, padded, run_segments
from slipway.stage import Context, Progress
from slipway.validation.findings import ValidationReport
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import run as quantize
from slipway_validate.by_layers import leave_out
from slipway_validate.judging.yardsticks import plan_yardsticks, read_measured
from slipway_validate.outputs import REFERENCE_CODE
from slipway_validate.params import SampleParams, ValidateParams
from slipway_validate.protocol.inputs import INPUTS_FILE
from slipway_validate.protocol.messages import LOGITS_FILE, RunSpec, Spec
from slipway_validate.protocol.process import start_runner
from slipway_validate.reference.running import RUNTIME
from slipway_validate.reference.stage import STAGE as REFERENCE
from slipway_validate.runner.runtime_reference import ReferenceModel, load
from slipway_validate.runner.yardsticks.computing import compute_yardsticks
from slipway_validate.stage import STAGE as VALIDATE
from support.models.current_kinds import make_kind
from support.models.validated_here import Validated
from support.models.validation_models import Models, make_base

ROWS = [np.arange(2, 22), np.arange(5, 12), np.arange(30, 43)]
MIB = 1 << 20


def compute(model: Any, segments: tuple[int, ...], rows: list[Any], *, bare: bool = False) -> Logits:
    ids, mask = padded(rows, side="left", token=0)
    if not bare:
        return np.concatenate([part for _, part in run_segments(model, ids, mask, segments)], axis=1)
    with model.without_adapter():
        return compute(model, segments, rows)


def all_results(model: Any) -> list[Logits]:
    """Compute plain windows, a batch with padding and a cache, with and without the adapter; two are children of a job."""
    bare = isinstance(model, ReferenceModel)
    jobs: list[Callable[[], Any]] = [
        partial(compute, model, (20,), ROWS[:1]),
        partial(compute, model, (16, 1, 1, 2), ROWS),
        lambda: model.together([partial(compute, model, (7,), ROWS[1:2]), partial(compute, model, (13,), ROWS[2:])]),
        partial(compute, model, (20,), ROWS[:1], bare=bare),
        partial(compute, model, (12, 8), ROWS[:1], bare=bare),
    ]
    first, second, (third, fourth), *others = model.together(jobs)
    return [first, second, third, fourth, *others]


def assert_alike(made: Callable[..., Any]) -> Any:
    """Compare a model's results layer by layer with those of the same model as a whole."""
    whole, by_layers = made(), made(by_layers=True)
    for native in (True, False):
        if not native:
            whole.prepare_comparison()
            by_layers.prepare_comparison()
        for expected, found in zip(all_results(whole), all_results(by_layers), strict=True):
            assert found.dtype == expected.dtype
            assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()
    assert not [thread for thread in threading.enumerate() if thread.name == "block-passes"]
    return by_layers


def some(names: tuple[str, ...]) -> list[object]:
    return [name if place < 1 else pytest.param(name, marks=pytest.mark.slow) for place, name in enumerate(names)]


@pytest.mark.parametrize(
    "name",
    some(
        (
            "ministral3",
            "qwen3.5-moe",
            "mixtral",
            "gemma3n",
            "gemma4",
            "mamba2",
            "falcon-h1",
            "nemotron-h-moe",
            "lfm2-moe",
            "deepseek-v3",
            "gpt-oss",
            "bamba",
            "qwen3-vl",
        )
    ),
)
def test_a_reference_gives_the_results_of_the_whole_model(name: str, tmp_path: Path) -> None:
    kind = make_kind(name, tmp_path, dtype=torch.bfloat16)
    assert_alike(partial(load, kind.base, kind.adapter, threads=1))


@pytest.mark.parametrize("level", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_packed_model_is_unpacked_a_layer_at_a_time(
    level: str, tiny: Models, context: Context, tmp_path: Path
) -> None:
    merged = tmp_path / "merged"
    merged.mkdir()
    for path in tiny.merged.iterdir():
        (merged / path.name).write_bytes(path.read_bytes())
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tiny.merged / "model.safetensors").items()}
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    config = json.loads((merged / "config.json").read_text())
    (merged / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    params = QuantizeParams(format="pytorch", level=level, group_size=16, check=False)
    folder = quantize({"model": merged}, params, context)["model"]
    model = assert_alike(partial(transformers_runtime.load, folder, threads=1))
    packed = [each for each in model.module.modules() if hasattr(each, "quantization_scheme")]
    assert packed
    assert all(each.quantization_status.value == "compressed" and not hasattr(each, "weight") for each in packed)


@pytest.mark.parametrize("level", ["", "int8"])
def test_experts_are_joined_a_layer_at_a_time(
    level: str, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers joins the experts of all layers when it loads a mixture; here only those of the layer that computes are there."""
    kind = make_kind("glm4-moe", tmp_path, dtype=torch.bfloat16)
    made, make = Counter[str](), joined_weights._JoinedWeight.make

    def count(weight: Any) -> torch.Tensor:
        layers = {
            name.split(".layers.")[1].split(".")[0]
            for name, value in stacks(weight.model)
            if not joined_weights.is_left_out(value)
        }
        assert layers <= {weight.name.split(".layers.")[1].split(".")[0]}, "another layer's experts are still there"
        made[weight.name] += 1
        return make(weight)

    monkeypatch.setattr(joined_weights._JoinedWeight, "make", count)
    if level:
        params = QuantizeParams(format="pytorch", level=level, group_size=16, check=False)
        model = assert_alike(
            partial(transformers_runtime.load, quantize({"model": kind.base}, params, context)["model"], threads=1)
        )
    else:
        model = assert_alike(partial(load, kind.base, kind.adapter, threads=1))
    left = stacks(model.module)
    assert len(left) == len(made) >= 2
    assert all(joined_weights.is_left_out(value) for _, value in left)


def stacks(module: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in module.named_parameters() if "experts" in name and value.dim() == 3]


def test_a_stack_of_other_weights_than_the_model_has_is_refused(tmp_path: Path) -> None:
    kind = make_kind("mixtral", tmp_path, dtype=torch.bfloat16)
    model = transformers_runtime.load(kind.base, threads=1, by_layers=True)
    file = kind.base / "model.safetensors"
    cut = {name: value[:8].clone() if ".experts." in name else value for name, value in load_file(file).items()}
    save_file(cut, tmp_path / "other", {"format": "pt"})
    (tmp_path / "other").replace(file)  # the model still maps the file that it has opened
    with pytest.raises(ValueError, match=r"the stored weights of .*experts.* do not make one of"):
        compute(model, (20,), ROWS[:1])


def note_blocks(passes: BlockPasses, module: Any) -> list[int]:
    """Return a list that receives the number of each block that is brought into memory."""
    order, blocks, hold = list[int](), find_blocks(module), passes.weights.hold

    def note(block: Any) -> Callable[[], None]:
        order.append(blocks.index(block))
        return hold(block)

    passes.weights.hold = note  # type: ignore[method-assign]
    return order


@pytest.mark.parametrize("at_once", [True, False])
def test_all_calls_go_through_a_block_before_the_next(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:  # then what waits takes all the memory that it may, and further calls begin in a later pass
        monkeypatch.setattr("slipway.model.pytorch.block_passes.HELD_BYTES", 1)
    module = make_base()
    ids = torch.arange(2, 12)[None]
    expected = [module(input_ids=ids + at).logits for at in range(4)]
    passes = BlockPasses(module)
    order = note_blocks(passes, module)
    results = passes.together([lambda at=at: module(input_ids=ids + at).logits for at in range(4)])
    assert order == [0, 1, 2] * (1 if at_once else 4), "two layers and the head"
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_an_error_ends_all_jobs_and_leaves_the_model_as_it_was() -> None:
    module = make_base()
    passes = BlockPasses(module)
    before = module(input_ids=torch.arange(2, 9)[None]).logits

    def fail() -> None:
        module(input_ids=torch.arange(2, 9)[None])
        raise ValueError("no results")

    def never_ends() -> None:
        while True:
            module(input_ids=torch.arange(2, 9)[None])

    with pytest.raises(ValueError, match="no results"):
        passes.together([never_ends, lambda: passes.together([never_ends, fail])])
    assert not [thread for thread in threading.enumerate() if thread.name == "block-passes"]
    assert torch.equal(module(input_ids=torch.arange(2, 9)[None]).logits, before)
    with pytest.raises(IndexError):
        passes.together([lambda: module(input_ids=torch.full((1, 3), 1 << 30))])
    assert passes.together([]) == []


class ByLayers(Validated):
    """A validation whose models are computed layer by layer."""

    def spec(self, runtime: str, folder: Path) -> RunSpec:
        return leave_out(super().spec(runtime, folder), "it is too large")[0]


@pytest.fixture(scope="module")
def outputs(tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    work = Context(workdir=tmp_path_factory.mktemp("quantize"))
    params = QuantizeParams(format="pytorch", level="int8", group_size=16, check=False)
    packed = quantize({"model": tiny.merged}, params, work)["model"]
    return {"pytorch": tiny.merged, "pytorch-int8": packed, "pytorch-int4": tiny.scaled("weaker", 0.5)}


def test_a_validation_gives_the_same_verdicts(tiny: Models, outputs: dict[str, Path], tmp_path: Path) -> None:
    runs = []
    for kind in (Validated, ByLayers):
        (work := tmp_path / kind.__name__).mkdir()
        runs.append(kind(tiny.base, tiny.adapter, work, merged=tiny.merged))
    whole, by_layers = runs
    assert by_layers.reference.perplexity == pytest.approx(whole.reference.perplexity, rel=1e-6)
    assert by_layers.reference.noise == pytest.approx(whole.reference.noise, abs=1e-4)
    for name in ("pytorch-int8", "pytorch-int4"):
        one, other = (run.output(name, outputs[name]) for run in runs)
        assert (one.status, one.fit.answer) == (other.status, other.fit.answer)
        assert one.to_reference is not None
        assert other.to_reference is not None
        assert other.to_reference.mean_kl == pytest.approx(one.to_reference.mean_kl, abs=1e-7)
        assert other.adapter_strength == pytest.approx(one.adapter_strength, abs=1e-4)
        assert [case.name for case in other.cases if not case.skipped] == [
            case.name for case in one.cases if not case.skipped
        ]
        assert (one.greedy is None, other.greedy is None) == (False, True)


def test_what_a_level_must_cost_is_the_same(tiny: Models, outputs: dict[str, Path], tmp_path: Path) -> None:
    run = Validated(tiny.base, tiny.adapter, tmp_path, merged=tiny.merged)
    inputs, packed = {"base": tiny.base, "adapter": tiny.adapter}, {"pytorch-int8": outputs["pytorch-int8"]}
    asked = plan_yardsticks(inputs, packed, run.reference, run.spec(RUNTIME, tiny.base), threads=1, logit_bytes=1 << 30)
    assert asked is not None
    figures = []
    for by_layers in (False, True):
        (folder := tmp_path / str(by_layers)).mkdir()
        asked = asked.model_copy(update={"by_layers": by_layers})
        compute_yardsticks(asked, folder, report=lambda *_: None)
        figures.append(read_measured(folder, asked, run.reference))
    whole, found = figures
    assert not found.missing
    assert whole.cost("int8")
    assert found.cost("int8") == pytest.approx(whole.cost("int8"), rel=1e-4)


def test_layers_are_reported_as_they_are_computed(tiny: Models, tmp_path: Path) -> None:
    """A proof of a large model takes hours, in which no sample is finished before the last layer of a pass."""
    Samples(np.arange(2, 34, dtype=np.int64)[None].repeat(2, 0)).write(tmp_path / "samples")
    spec = RunSpec(runtime=REFERENCE_CODE, model=tiny.merged, samples=tmp_path / "samples", by_layers=True)
    seen: list[Progress] = []
    ctx = Context(workdir=tmp_path, on_progress=seen.append)
    with start_runner(Spec(run=spec), tmp_path / "run", ctx, label="reference", timeout_seconds=600) as runner:
        assert runner.result.status == "done", runner.result.message
    assert {(each.phase, each.unit, each.total) for each in seen} == {("reference", "layers", 8 * 3)}, (
        "two layers and the head"
    )
    assert [each.done for each in seen] == sorted(each.done for each in seen)
    assert seen[0].done == 1
    assert seen[-1].done % 3 == 0


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    (tmp_path / INPUTS_FILE).write_text("{}")
    spec = RunSpec(
        runtime="x", model=tmp_path, samples=tmp_path, prompts=((1, 2),), drafts=((3,),), drafting=True, pictures=2
    )
    left, said = leave_out(spec, "it is too large")
    assert left.by_layers
    assert (left.prompts, left.drafts, left.benchmark) == ((), (), None)
    assert said == (
        "computed layer by layer, because it is too large; not run: greedy continuations, answers to the test inputs, "
        "drafts of the multi-token head, prompts with pictures or sound"
    )


@pytest.mark.slow
def test_the_stages_compute_by_layers_and_say_so(
    tiny: Models, outputs: dict[str, Path], held_out: Path, tmp_path: Path
) -> None:
    (made := tmp_path / "reference").mkdir()
    (judged := tmp_path / "judged").mkdir()
    sources = {"base": tiny.base, "adapter": tiny.adapter, "heldout": held_out}
    params = {"sequence_length": 32, "test_samples": 2, "by_layers": "always"}
    reference = REFERENCE.run(sources, SampleParams(**params), Context(workdir=made))["reference"]
    inputs = {**sources, "reference": reference, "pytorch-int8": outputs["pytorch-int8"]}
    report = ValidationReport.read(
        VALIDATE.run(inputs, ValidateParams(**params), Context(workdir=judged))["validation"]
    )
    (output,) = report.outputs
    assert output.passed
    assert (output.greedy, output.speed) == (None, None)
    assert "computed layer by layer, because by_layers is always; not run: speed" in output.notes
    assert "layer by layer" in report.reference.description
    assert any("not run: greedy continuations" in each for each in report.warnings)
    assert output.level_cost


def save_wide(folder: Path, layers: int) -> Path:
    """Save a model of wide layers, packed as int8: 67 million weights a layer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder / "plain")
    params = QuantizeParams(format="pytorch", level="int8", check=False)
    (folder / "work").mkdir()
    return quantize({"model": folder / "plain"}, params, Context(workdir=folder / "work"))["model"]


@pytest.mark.slow
def test_memory_is_that_of_a_layer(tmp_path: Path) -> None:
    """Six layers are 805 MB unpacked, and one of them 134 MB: the others are never there at the same time. Libraries take the same in both processes."""
    layers, layer_bytes = 6, 2 * 67_100_000
    model = save_wide(tmp_path, layers)
    Samples(np.arange(2, 34, dtype=np.int64)[None].repeat(2, 0)).write(tmp_path / "samples")
    peaks = {}
    for by_layers in (False, True):
        spec = RunSpec(runtime=REFERENCE_CODE, model=model, samples=tmp_path / "samples", by_layers=by_layers)
        folder, ctx = tmp_path / str(by_layers), Context(workdir=tmp_path)
        with start_runner(Spec(run=spec), folder, ctx, label="memory", timeout_seconds=1800) as runner:
            watch = Watch(runner.anonymous_bytes)
            assert runner.result.status == "done", runner.result.message
            peaks[by_layers] = watch.peak
    logits = [np.load(tmp_path / str(each) / LOGITS_FILE) for each in (False, True)]
    assert np.abs(logits[0] - logits[1]).max() <= 1e-6 * np.abs(logits[0]).max()
    assert peaks[False] > layers * layer_bytes
    assert peaks[False] - peaks[True] > (layers - 2) * layer_bytes, (
        "one is there, and what is made while it is unpacked"
    )


class Watch:
    """Reads a figure ten times a second, and keeps the largest."""

    def __init__(self, read: Callable[[], int]) -> None:
        self.peak, self._read = 0, read
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while (now := self._read()) or not self.peak:
            self.peak = max(self.peak, now)
            time.sleep(0.1)

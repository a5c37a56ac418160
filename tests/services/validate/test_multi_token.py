"""Multi-token heads: the share of their drafts that the model accepts, and a verdict on outputs that lack them or parts for images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from slipway.model.configuration import ModelConfig
from slipway.model.folder import ModelFolder
from slipway.model.pytorch.head_updates import merged_head, without_head
from slipway.model.pytorch.multi_token import HeadNotUnderstoodError, load_head
from slipway.proof.runtime import HEAD_FILE, Samples
from slipway.proof.transformers_runtime import from_pretrained
from slipway.stage import Context
from slipway.validation.findings import OutputStatus, ValidationReport
from slipway.validation.parts import MissingPart, MultiTokenHead
from slipway.validation.verdicts import Answer
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE as MERGE
from slipway_validate.judging.distances import LIMITS
from slipway_validate.judging.evaluate import Evaluator
from slipway_validate.judging.parts import find_missing
from slipway_validate.params import SampleParams, ValidateParams
from slipway_validate.protocol.messages import RunSpec
from slipway_validate.reference.running import has_multi_token_head
from slipway_validate.reference.stage import STAGE as REFERENCE
from slipway_validate.runner.multi_token import measure_head
from slipway_validate.runner.runtime_reference import ReferenceModel
from slipway_validate.runner.runtime_reference import load as load_reference
from slipway_validate.runner.survival.adapted import adapted_modules
from slipway_validate.stage import STAGE as VALIDATE
from support.models.current_kinds import Kind, make_kind
from support.models.multi_token import WEIGHTS, Tensors, drop, edit_tensors, is_of_head
from support.models.saved_adapters import edit
from support.models.validated_here import Validated
from support.models.validation_models import Models

SAMPLES: dict[str, Any] = {"sequence_length": 32, "test_samples": 3, "max_new_tokens": 2, "effort": "quick"}


def context(folder: Path) -> Context:
    folder.mkdir(parents=True)
    return Context(workdir=folder)


def merge(kind: Kind, folder: Path) -> Path:
    inputs = {"base": kind.base, "adapter": kind.adapter}
    return MERGE.run(inputs, MergeParams(verify="spot"), context(folder))["pytorch"]


def reference(inputs: dict[str, Path], folder: Path) -> tuple[Path, dict[str, Any]]:
    made = REFERENCE.run(inputs, SampleParams(**SAMPLES), context(folder))["reference"]
    figures: dict[str, Any] = json.loads((made / "reference.json").read_text())["figures"]
    return made, figures


def share_of(kind: Kind, tokens: torch.Tensor, *, adapter: bool) -> float:
    """Compute the share of accepted drafts window by window, with peft and the head alone."""
    model, _ = from_pretrained(kind.base, dtype="auto")
    whole = PeftModel.from_pretrained(model, str(kind.adapter)) if adapter else model
    head, equal = load_head(ModelFolder.open(kind.base), model), []
    for window in tokens:
        with torch.no_grad():
            results = whole.eval()(input_ids=window[None], output_hidden_states=True, use_cache=False)
        drafts = head(results.hidden_states[-1], window[None]).argmax(-1)[0]
        equal += [int(one) == int(other) for one, other in zip(drafts, results.logits[0, 1:].argmax(-1), strict=True)]
    return sum(equal) / len(equal)


def agree(kind: Kind) -> None:
    """Let model and head choose by the embedding of the last token: what layers add is small beside it, and their last norms are one."""

    def change(tensors: Tensors) -> None:
        for name in [
            name for name in tensors if name.endswith((".o_proj.weight", ".down_proj.weight", ".out_proj.weight"))
        ]:
            tensors[name] *= 0.01
        tensors["mtp.fc.weight"] = torch.cat([torch.eye(64), torch.zeros(64, 64)], dim=-1)
        tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
        tensors["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(64)

    edit_tensors(kind.base, change)


@pytest.mark.slow
def test_the_reference_has_the_share_of_accepted_drafts_with_and_without_the_adapter(
    tmp_path: Path, held_out: Path
) -> None:
    kind = make_kind("qwen3.5", tmp_path / "kind")
    agree(kind)
    inputs = {"base": kind.base, "adapter": kind.adapter, "heldout": held_out}
    made, figures = reference(inputs, tmp_path / "reference")
    head = MultiTokenHead.model_validate(figures["multi_token_head"])
    tokens = torch.from_numpy(np.load(made / "samples" / "tokens.npy"))
    assert (head.layers, head.tokens, head.not_run) == (1, 3 * 31, "")
    assert head.accepted_before == pytest.approx(share_of(kind, tokens, adapter=False), abs=0.011)
    assert head.accepted_after == pytest.approx(share_of(kind, tokens, adapter=True), abs=0.011)
    assert head.accepted_before is not None
    assert head.accepted_after is not None
    assert head.accepted_before > 0.8 > 0.6 > head.accepted_after
    warnings = json.loads((made / "reference.json").read_text())["warnings"]
    assert any("moved away from its multi-token head" in warning for warning in warnings)


def measured(base: Path, work: Path) -> MultiTokenHead:
    """Measure the head of a plain model in this process."""
    model = load_reference(base, threads=1)
    Samples(np.arange(3, 19)[None]).write(work / "samples")
    model.prepare_comparison()
    spec = RunSpec(runtime="", model=base, samples=work / "samples", drafting=True)
    measure_head(model, spec, work, report=lambda *_: None)
    model.leave_comparison()
    return MultiTokenHead.model_validate_json((work / HEAD_FILE).read_bytes())


def test_an_incomplete_head_is_not_run_by_name(tmp_path: Path) -> None:
    kind = make_kind("glm4-moe", tmp_path / "kind")
    edit_tensors(kind.base, drop(lambda name: name == "model.layers.3.hnorm.weight"))
    head = measured(kind.base, tmp_path)
    assert head.accepted_after is None
    assert head.said.startswith("multi-token head: its drafts were not compared (it lacks 1 of its tensors")


def train_head(kind: Kind, module: str) -> None:
    """Give the adapter a pair of factors for one layer of the head too."""
    settings = json.loads((kind.adapter / "adapter_config.json").read_text())
    rows, columns = load_file(kind.base / WEIGHTS)[f"{module}.weight"].shape
    generator = torch.Generator().manual_seed(5)

    def add(tensors: Mapping[str, torch.Tensor]) -> Tensors:
        name = f"base_model.model.{module}"
        first, second = torch.randn(4, columns, generator=generator), torch.randn(rows, 4, generator=generator)
        return {**tensors, f"{name}.lora_A.weight": first, f"{name}.lora_B.weight": second}

    edit(kind.adapter, tensors=add, target_modules=[*settings["target_modules"], module])


@pytest.mark.parametrize("name", ["qwen3.5-vision", pytest.param("glm4-moe", marks=pytest.mark.slow)])
def test_a_head_that_the_adapter_trained_is_merged_as_it_is_delivered(tmp_path: Path, name: str) -> None:
    kind = make_kind(name, tmp_path / "kind")
    module = "mtp.fc" if name.startswith("qwen") else "model.layers.3.eh_proj"
    before = load_file(kind.adapter / "adapter_model.safetensors")
    train_head(kind, module)
    delivered = load_file(merge(kind, tmp_path / "merge") / WEIGHTS)
    with merged_head(ModelFolder.open(kind.base), kind.adapter) as folder:
        head = load_file(folder.path / WEIGHTS)
        base = load_file(kind.base / WEIGHTS)
        changed = [key for key in head if not torch.equal(head[key], base[key])]
        assert changed == [f"{module}.weight"]
        assert torch.allclose(head[changed[0]], delivered[changed[0]], atol=1e-5)
        model, _ = from_pretrained(kind.base, dtype="auto")
        trained = dict(load_head(folder, model).named_parameters())
        assert torch.equal(trained["computing.layers.0.eh_proj.weight"], head[changed[0]])
    with without_head(model, ModelFolder.open(kind.base), kind.adapter) as rest:
        assert load_file(rest / "adapter_model.safetensors").keys() == before.keys()
    if name.startswith("qwen"):
        tuned = load_reference(kind.base, kind.adapter, threads=1)
        assert isinstance(tuned, ReferenceModel)
        _, left_out = adapted_modules(ModelFolder.open(kind.base), kind.adapter)
        assert left_out[module] == "it is in the multi-token head, which transformers does not load with the model"


def test_an_adapter_of_the_head_alone_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    kind = make_kind("qwen3.5", tmp_path / "kind")
    edit(kind.adapter, tensors=lambda _: {}, target_modules=[], target_parameters=None)
    train_head(kind, "mtp.layers.0.mlp.up_proj")
    tokens = torch.arange(3, 19)[None]
    plain, _ = from_pretrained(kind.base, dtype="auto")
    tuned = load_reference(kind.base, kind.adapter, threads=1)
    with torch.no_grad():
        assert torch.equal(plain.eval()(tokens).logits, tuned.module(tokens).logits)


def test_another_update_of_the_head_is_not_measured(tmp_path: Path) -> None:
    kind = make_kind("qwen3.5", tmp_path / "kind")
    train_head(kind, "mtp.fc")
    edit(kind.adapter, use_dora=True)
    with (
        pytest.raises(HeadNotUnderstoodError, match="no half of a plain pair"),
        merged_head(ModelFolder.open(kind.base), kind.adapter),
    ):
        pass


def test_a_head_with_nan_is_not_measured(tmp_path: Path) -> None:
    kind = make_kind("qwen3.5", tmp_path / "kind")
    edit_tensors(kind.base, lambda tensors: tensors.update({"mtp.fc.weight": torch.full((64, 128), torch.nan)}))
    head = measured(kind.base, tmp_path)
    assert (head.accepted_after, head.not_run) == (None, "its drafts contain NaN or infinity")


def test_only_a_model_with_tensors_of_a_head_is_measured(tmp_path: Path, tiny: Models) -> None:
    assert not has_multi_token_head(ModelFolder.open(tiny.base))
    assert not has_multi_token_head(ModelFolder(tmp_path, ModelConfig({})))  # no weights: what runs it says so
    assert has_multi_token_head(ModelFolder.open(make_kind("qwen3-next", tmp_path / "kind").base))


@pytest.mark.parametrize(
    ("head", "said", "warned"),
    [
        (
            MultiTokenHead(accepted_before=0.742, accepted_after=0.709, tokens=90),
            "multi-token head: its drafts are accepted 71 % of the time, 74 % before the fine-tune",
            False,
        ),
        (
            MultiTokenHead(accepted_after=0.5, tokens=9),
            "multi-token head: its drafts are accepted 50 % of the time",
            False,
        ),
        (
            MultiTokenHead(accepted_before=0.7, accepted_after=0.59, tokens=90),
            "multi-token head: its drafts are accepted 59 % of the time, 70 % before the fine-tune",
            True,
        ),
        (MultiTokenHead(not_run="it is odd"), "multi-token head: its drafts were not compared (it is odd)", False),
    ],
)
def test_what_is_said_of_a_head(head: MultiTokenHead, said: str, *, warned: bool) -> None:
    assert head.said == said
    assert bool(head.warning) is warned
    assert not warned or head.warning.endswith("serve without it, or train it too")


BROKEN = "broken: the multi-token head of the base (15 tensors) is not in it"


def test_a_verdict_names_the_missing_head(tmp_path: Path) -> None:
    kind = make_kind("qwen3.5", tmp_path / "kind")
    right = merge(kind, tmp_path / "merge")
    lacking = edit_tensors(shutil.copytree(right, tmp_path / "lacking"), drop(lambda name: is_of_head(kind.name, name)))
    (tmp_path / "work").mkdir()
    run = Validated(kind.base, kind.adapter, tmp_path / "work", merged=right)
    run.evaluator = Evaluator(
        run.reference, run.prepared.family, LIMITS, decode=lambda _: "", base=ModelFolder.open(kind.base)
    )
    assert run.output("pytorch", right).missing == ()
    verdict = run.output("pytorch-bf16", lacking)
    assert (verdict.status, verdict.faithful.said) == (OutputStatus.FAILED, BROKEN)
    assert [each.name for each in verdict.failed_checks] == ["missing_tensors"]


@pytest.mark.slow
def test_an_output_without_the_head_fails_by_name_in_the_stage(tmp_path: Path, held_out: Path) -> None:
    kind = make_kind("qwen3.5", tmp_path / "kind")
    right = merge(kind, tmp_path / "merge")
    lacking = shutil.copytree(right, tmp_path / "lacking")
    edit_tensors(lacking, drop(lambda name: is_of_head(kind.name, name)))
    inputs = {"base": kind.base, "adapter": kind.adapter, "heldout": held_out}
    params = ValidateParams(**SAMPLES, benchmark_performance=False)
    folder = VALIDATE.run({**inputs, "pytorch": right, "pytorch-bf16": lacking}, params, context(tmp_path / "v"))
    report = ValidationReport.read(folder["validation"])
    assert report.reference.multi_token_head is not None
    assert report.reference.multi_token_head.accepted_after is not None
    assert (report.output("pytorch").status, report.output("pytorch").missing) == (OutputStatus.PASSED, ())
    verdict = report.output("pytorch-bf16")
    assert verdict.faithful.answer is Answer.FAILED
    assert verdict.faithful.said == BROKEN
    assert verdict.remedy.startswith("merge again")


EYE = "model.visual.blocks.0.mlp.linear_fc1.weight"


def test_a_tensor_of_the_part_for_images_is_missed_by_name(tmp_path: Path) -> None:
    kind = make_kind("qwen3.5-vision", tmp_path / "kind")
    right = merge(kind, tmp_path / "merge")
    assert find_missing(ModelFolder.open(kind.base), right) == ()
    count = sum(".visual." in name for name in load_file(kind.base / WEIGHTS))
    edit_tensors(right, drop(lambda name: name == EYE))
    (missing,) = find_missing(ModelFolder.open(kind.base), right)
    assert missing == MissingPart(part="part for images and sound", missing=1, tensors=count, first=EYE)
    assert missing.said == f"1 of {count} tensors of the base's part for images and sound is not in it, first {EYE}"
    edit_tensors(right, drop(lambda name: ".visual." in name or name.startswith("mtp.")))
    assert [each.said for each in find_missing(ModelFolder.open(kind.base), right)] == [
        "the multi-token head of the base (15 tensors) is not in it",
        f"the part for images and sound of the base ({count} tensors) is not in it",
    ]


def test_a_head_that_is_rounded_or_has_its_experts_in_another_form_is_there(tmp_path: Path) -> None:
    base = make_kind("glm4-moe", tmp_path / "kind").base
    packed = shutil.copytree(base, tmp_path / "packed")

    def pack(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.") and name.endswith("proj.weight")]:
            value = tensors.pop(name)
            stacked = ".experts." in name
            place = f"{name.partition('.experts.')[0]}.experts.gate_up_proj" if stacked else f"{name}_packed"
            tensors[place] = value.contiguous()

    edit_tensors(packed, pack)
    assert find_missing(ModelFolder.open(base), packed) == ()


def test_nothing_is_said_of_another_class_or_a_rounded_base(tmp_path: Path) -> None:
    base = make_kind("glm4-moe", tmp_path / "kind").base
    lacking = edit_tensors(shutil.copytree(base, tmp_path / "lacking"), drop(lambda name: "layers.3." in name))
    assert len(find_missing(ModelFolder.open(base), lacking)) == 1
    settings = json.loads((base / "config.json").read_text())
    for changed in (
        {"architectures": ["Glm4MoeForSequenceClassification"]},
        {"num_hidden_layers": 5},
    ):
        (lacking / "config.json").write_text(json.dumps({**settings, **changed}))
        assert find_missing(ModelFolder.open(base), lacking) == ()
    (lacking / "config.json").write_text(json.dumps(settings))
    (base / "config.json").write_text(json.dumps({**settings, "quantization_config": {"quant_method": "fp8"}}))
    assert find_missing(ModelFolder.open(base), lacking) == ()
    assert find_missing(ModelFolder.open(base), tmp_path) == ()

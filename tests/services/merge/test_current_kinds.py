"""Models of this year are merged tensor by tensor: each is base plus adapter, rounded once, and what no factor touches stays as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from slipway.base_match.evidence import misfit
from slipway.model.folder import ModelFolder
from slipway.model.model_facts import model_facts
from slipway.model.pytorch.placing import without_conversion
from slipway.model.runs.checkpoints import read_adapter_config
from slipway.stage import Context
from slipway_merge.adapter.adapter import read_adapter
from slipway_merge.params import MergeParams
from slipway_merge.plan.plan import Planner
from slipway_merge.stage import STAGE
from slipway_merge.tensors.tensor_io import TensorReader
from slipway_prepare.params import PrepareParams
from slipway_prepare.stage import STAGE as PREPARE
from support.models.current_kinds import (
    KINDS,
    TEXT_PART,
    Kind,
    expert_adapter,
    make_kind,
    text_adapter,
)
from support.models.saved_adapters import edit
from support.models.text_of_many import make_model

WEIGHTS = "model.safetensors"
SCALING = 2.5
PATTERNED, PATTERNED_STACK = "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.experts"
IN_TEXT = (
    "gemma3-vision",
    "gemma4-vision",
    "mistral3",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3.5-moe-vision",
    "qwen3.5-vision",
)
BY_EXPERT = (
    *("deepseek-v3", "glm4-moe", "lfm2-moe", "mixtral", "nemotron-h-moe", "qwen3-next", "qwen3.5-moe"),
    "qwen3.5-moe-vision",
)


def made(name: str, folder: Path) -> Kind:
    """Make a kind whose base can be merged: a packed one is prepared."""
    kind = make_kind(name, folder, dtype=torch.bfloat16)
    if not KINDS[name].packed:
        return kind
    (folder / "prepared").mkdir()
    prepared = PREPARE.run({"base": kind.base}, PrepareParams(), Context(workdir=folder / "prepared"))["base"]
    return Kind(name, prepared, kind.adapter)


def merged(kind: Kind, adapter: Path, work: Path) -> tuple[Path, Context]:
    work.mkdir()
    ctx = Context(workdir=work)
    return STAGE.run({"base": kind.base, "adapter": adapter}, MergeParams(verify="full"), ctx)["pytorch"], ctx


def by_peft(kind: Kind, folder: Path) -> dict[str, torch.Tensor]:
    """Return what peft's own merge makes in float32, under the names of the files."""
    model = kind.model_class.from_pretrained(kind.base, dtype=torch.float32)
    with without_conversion():
        PeftModel.from_pretrained(model, kind.adapter).merge_and_unload().save_pretrained(folder)
    return load_file(folder / WEIGHTS)


def check(base: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> set[str]:
    """Compare a merge with its expected values in float32, and return the names of the tensors that changed."""
    assert ours.keys() == base.keys()
    changed = set()
    for name, before in base.items():
        after, value = ours[name], expected.get(name)
        if name.startswith(("score.", "classifier.")):  # the adapter brings it whole, in a type of its own
            assert value is not None
            assert torch.equal(after.float(), value)
            continue
        assert after.dtype == before.dtype
        if value is None or torch.equal(value, before.float()):
            assert torch.equal(after.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8)), name
            continue
        changed.add(name)
        _, exponent = torch.frexp(value)
        half_a_step = torch.ldexp(torch.ones_like(value), exponent - 9)
        assert ((after.float() - value).abs() <= 1.001 * half_a_step + 1e-6).all(), name
        assert not torch.equal(after, before), name
    return changed


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_tensor_is_base_plus_adapter_rounded_once(tmp_path, name):
    kind = made(name, tmp_path)
    assert misfit(kind.adapter, read_adapter_config(kind.adapter), kind.base) == ""
    output, ctx = merged(kind, kind.adapter, tmp_path / "work")
    base, ours = load_file(kind.base / WEIGHTS), load_file(output / WEIGHTS)
    changed = check(base, ours, by_peft(kind, tmp_path / "peft"))
    assert len(changed) == ctx.facts["tensors_merged"]
    assert not changed & set(KINDS[name].beside or ())
    assert set(KINDS[name].beside or ()) <= set(ours)
    verified = ctx.facts["verified"]
    assert verified["logits_difference"] < verified["logits_change"] / 2
    assert "warnings" not in ctx.facts
    for file in kind.base.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            assert (output / file.name).read_bytes() == file.read_bytes()


def test_a_model_in_its_publisher_s_own_layout_is_merged_and_not_loaded(tmp_path):
    """Qwen's own files of Qwen3-ASR are all within a "thinker", and transformers has a class of the same name with another layout."""

    def own(name: str) -> str:
        return "thinker." + name.replace("model.language_model.", "model.").replace(
            "model.audio_tower.", "audio_tower."
        )

    kind = made("qwen3-asr", tmp_path)
    save_file({own(name): tensor for name, tensor in load_file(kind.base / WEIGHTS).items()}, kind.base / WEIGHTS)
    path = kind.base / "config.json"
    config = json.loads(path.read_text())
    config["thinker_config"] = {name: config.pop(name) for name in ("text_config", "audio_config")}
    path.write_text(json.dumps(config))
    prefix = "base_model.model."
    edit(
        kind.adapter,
        tensors=lambda tensors: {prefix + own(name.removeprefix(prefix)): tensor for name, tensor in tensors.items()},
        target_modules=sorted(
            map(own, json.loads((kind.adapter / "adapter_config.json").read_text())["target_modules"])
        ),
    )
    output, ctx = merged(kind, kind.adapter, tmp_path / "work")
    assert "publisher's layout" in ctx.facts["verified"]["loaded"]
    base, ours = load_file(kind.base / WEIGHTS), load_file(output / WEIGHTS)
    factors = load_file(kind.adapter / "adapter_model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], ours[name])}
    assert {f"{prefix}{name.removesuffix('.weight')}.lora_A.weight" for name in changed} == {
        name for name in factors if "lora_A" in name
    }
    for name in changed:
        a, b = (factors[f"{prefix}{name.removesuffix('.weight')}.lora_{side}.weight"] for side in "AB")
        expected = base[name].float() + SCALING * (b @ a)
        assert (ours[name].float() - expected).abs().max() <= 2**-8 * expected.abs().max() + 1e-6


@pytest.mark.parametrize("name", IN_TEXT)
def test_an_adapter_of_the_text_model_alone_finds_its_place(tmp_path, name):
    kind = made(name, tmp_path)
    output, ctx = merged(kind, text_adapter(kind, tmp_path / "text"), tmp_path / "work")
    whole, _ = merged(kind, kind.adapter, tmp_path / "whole")
    base, ours, all_of_it = (load_file(folder / WEIGHTS) for folder in (kind.base, output, whole))
    of_text = {name for name in base if not name.startswith(("model.vi", "vi", "multi_modal", "model.multi_modal"))}
    of_text -= {name for name in base if "embed_vision" in name}
    for tensor in base:
        expected = all_of_it if tensor in of_text else base
        assert torch.equal(ours[tensor].view(torch.uint8), expected[tensor].view(torch.uint8)), tensor
    factors = load_file(kind.adapter / "adapter_model.safetensors")
    assert 2 * len(ctx.facts["modules"]) >= sum(TEXT_PART in factor for factor in factors)
    assert "logits_difference" in ctx.facts["verified"]


def test_ranks_and_scalings_by_name_in_the_text_model_are_those_of_the_training(tmp_path):
    """The whole check compares with peft, which gets the patterns under the names of the whole model."""
    kind = made("qwen3.5-moe-vision", tmp_path)
    adapter = text_adapter(kind, tmp_path / "text")
    lora = f"base_model.model.{PATTERNED}.lora_"

    def widen(tensors):
        return tensors | {
            f"{lora}{side}.weight": torch.cat([tensors[f"{lora}{side}.weight"]] * 2, dim=dim)
            for side, dim in (("A", 0), ("B", 1))
        }

    alphas = {PATTERNED: 50, f"{PATTERNED_STACK}.down_proj": 30}
    edit(adapter, tensors=widen, rank_pattern={PATTERNED: 8}, alpha_pattern=alphas)
    output, ctx = merged(kind, adapter, tmp_path / "work")
    assert "logits_difference" in ctx.facts["verified"]
    name = f"{PATTERNED.replace('model.', f'model.{TEXT_PART}')}.weight"
    factors = load_file(adapter / "adapter_model.safetensors")
    update = 50 / 8 * (factors[f"{lora}B.weight"] @ factors[f"{lora}A.weight"])
    expected = load_file(kind.base / WEIGHTS)[name].float() + update
    assert torch.allclose(load_file(output / WEIGHTS)[name].float(), expected, rtol=2**-7)


def test_stacks_that_a_base_stores_transposed_are_merged_as_they_are_stored(tmp_path):
    """Qwen3-VL's experts are published so, and saved by transformers otherwise."""
    model = make_model("qwen3_vl_moe").eval()
    model.save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / WEIGHTS)
    stacks = {name for name in tensors if name.endswith(".experts.down_proj")}  # the other is square, and never turned
    shutil.copytree(tmp_path / "saved", tmp_path / "published")
    published = {name: turn(value) if name in stacks else value for name, value in tensors.items()}
    save_file(published, tmp_path / "published" / WEIGHTS, metadata={"format": "pt"})
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, target_modules=[], target_parameters=parameters, init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    results = {}
    for name in ("saved", "published"):
        kind = Kind(name, tmp_path / name, tmp_path / "adapter")
        folder, ctx = merged(kind, kind.adapter, tmp_path / f"{name}-work")
        assert "logits_difference" in ctx.facts["verified"]
        results[name] = load_file(folder / WEIGHTS)
    for name, value in results["saved"].items():
        assert torch.equal(results["published"][name], turn(value) if name in stacks else value), name
        assert torch.equal(value, tensors[name]) != (".experts." in name)


def turn(value):
    """Exchange the two axes of each matrix of a stack."""
    return value.transpose(1, 2).contiguous()


@pytest.mark.parametrize("name", BY_EXPERT)
def test_a_pair_for_each_projection_of_each_expert_is_added_to_its_own(tmp_path, name):
    kind = made(name, tmp_path)
    adapter = expert_adapter(kind, tmp_path / "experts")
    output, ctx = merged(kind, adapter, tmp_path / "work")
    base, factors = load_file(kind.base / WEIGHTS), load_file(adapter / "adapter_model.safetensors")
    expected = {}
    for key, a in factors.items():
        if key.endswith(".lora_A.weight"):
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = factors[key.replace("lora_A", "lora_B")]
            expected[f"{module}.weight"] = base[f"{module}.weight"].float() + SCALING * (b @ a)
    changed = check(base, load_file(output / WEIGHTS), expected)
    assert changed == expected.keys()
    assert sum(".experts." in name for name in changed) >= 8
    assert "logits_difference" in ctx.facts["verified"]


def test_a_stack_is_computed_expert_by_expert(tmp_path):
    """A stack of gpt-oss-120b is 8.5 GB in float32."""
    kind = made("gpt-oss", tmp_path)
    model = ModelFolder.open(kind.base)
    with TensorReader() as reader:
        adapter, facts = read_adapter(kind.adapter), model_facts(ModelFolder.open(kind.base))
        plan = Planner(dict(model.tensors), model.config, adapter, lambda _: facts, reader).plan()
    stacks = [value.computed for value in plan.values.values() if value.computed and value.computed.part]
    assert len(stacks) == 4
    for computed in stacks:
        whole = computed.compute(np.dtype(np.float32))
        for expert in range(4):
            assert np.array_equal(computed.part(np.dtype(np.float32), slice(expert, expert + 1))[0], whole[expert])

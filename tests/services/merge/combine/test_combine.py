"""Several adapters as one: the same update as peft's combination of them, whatever scaling each had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import ValidationError

from slipway.errors import ModelMergeError
from slipway.stage import Context
from slipway_merge.combine.stage import STAGE
from slipway_merge.params import CombineParams, MergeParams
from slipway_merge.stage import STAGE as MERGE
from support.models.merge_cases import load, logits, make_model, randomise

WEIGHTS = (0.7, -0.4, 1.5)
TYPES: dict[str, dict[str, Any]] = {
    "cat": {},
    "linear": {},
    "ties": {"density": 0.6},
    "ties-frequency": {"density": 0.4, "majority_sign_method": "frequency"},
    "magnitude_prune": {"density": 0.3},
    "dare_linear": {"density": 0.5, "seed": 7},
    "dare_ties": {"density": 0.5, "seed": 7},
}


def save_adapters(folder: Path, *settings: dict[str, Any], kind: str = "qwen3") -> tuple[Path, list[Path]]:
    """A base and one adapter per setting; scalings differ from 1 and from each other."""
    base = folder / "base"
    make_model(kind).save_pretrained(base)
    adapters = []
    for number, lora in enumerate(settings):
        model = tf.AutoModelForCausalLM.from_pretrained(base)
        options = {"r": 4, "lora_alpha": 6 + 3 * number, "target_modules": ["q_proj", "up_proj"], **lora}
        tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
        randomise(tuned, seed=20 + number)
        tuned.save_pretrained(folder / f"adapter-{number}")
        adapters.append(folder / f"adapter-{number}")
    return base, adapters


def combine(folder: Path, adapters: list[Path], **params: Any) -> Path:
    workdir = folder / "work"
    workdir.mkdir()
    inputs = {"adapter": adapters[0], **{f"adapter-{number:02}": path for number, path in enumerate(adapters[1:], 2)}}
    return STAGE.run(inputs, CombineParams(**params), Context(workdir=workdir))["adapter"]


def peft_combined(base: Path, adapters: list[Path], method: str, **options: Any) -> Any:
    model = PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(base), adapters[0], adapter_name="a0")
    for number, path in enumerate(adapters[1:], 1):
        model.load_adapter(path, adapter_name=f"a{number}")
    names = [f"a{number}" for number in range(len(adapters))]
    model.base_model.add_weighted_adapter(names, list(WEIGHTS[: len(names)]), "all", combination_type=method, **options)
    model.set_adapter("all")
    return model.eval()


def updates(model: Any, adapter: str) -> dict[str, torch.Tensor]:
    """Update of every module that has this adapter."""
    return {
        name: module.get_delta_weight(adapter).detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight") and adapter in {*module.lora_A, *module.lora_embedding_A}
    }


def assert_same_updates(base: Path, ours: Path, expected: dict[str, torch.Tensor]) -> None:
    model = PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(base), ours)
    found = updates(model, "default")
    assert found.keys() == expected.keys()
    for name, update in found.items():
        assert expected[name].abs().max() > 1e-4
        assert torch.allclose(update, expected[name], rtol=0, atol=1e-6 * float(expected[name].abs().max())), name


@pytest.mark.parametrize("case", ["cat", "linear", "ties", "ties-frequency", "magnitude_prune"])
def test_as_peft_combines_them(tmp_path, case):
    base, adapters = save_adapters(tmp_path, {}, {}, {"target_modules": ["q_proj"]})
    method, options = case.partition("-")[0], TYPES[case]
    reference = peft_combined(base, adapters, method, **options)
    ours = combine(tmp_path, adapters, weights=WEIGHTS, combination_type=method, **options)
    assert_same_updates(base, ours, updates(reference, "all"))


@pytest.mark.parametrize("case", ["dare_linear", "dare_ties"])
def test_dare_is_pefts_with_the_same_seed(tmp_path, case):
    """One module, so that both draw the same random numbers for it."""
    one = {"target_modules": r".*layers\.1\.self_attn\.q_proj"}
    base, adapters = save_adapters(tmp_path, one, one)
    options = dict(TYPES[case])
    seed = options.pop("seed")
    model = PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(base), adapters[0], adapter_name="a0")
    model.load_adapter(adapters[1], adapter_name="a1")
    from peft.utils import merge_utils

    torch.manual_seed(seed)
    (layer,) = [module for module in model.modules() if hasattr(module, "get_delta_weight")]
    scale = [weight * layer.scaling[name] for name, weight in zip(("a0", "a1"), WEIGHTS, strict=False)]
    root = torch.tensor([abs(value) ** 0.5 for value in scale])
    sign = torch.tensor([1.0 if value >= 0 else -1.0 for value in scale])
    mix = getattr(merge_utils, case)
    a = mix([layer.lora_A[name].weight for name in ("a0", "a1")], root * sign, options["density"])
    b = mix([layer.lora_B[name].weight for name in ("a0", "a1")], root, options["density"])
    ours = combine(tmp_path, adapters, weights=WEIGHTS[:2], combination_type=case, seed=seed, **options)
    tuned = PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(base), ours)
    (found,) = updates(tuned, "default").values()
    assert torch.allclose(found, (b @ a).detach(), atol=1e-6)


def test_dare_is_repeatable_and_depends_on_its_seed(tmp_path):
    _, adapters = save_adapters(tmp_path, {}, {})
    results = []
    for number, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        out = combine(folder, adapters, combination_type="dare_linear", seed=seed)
        results.append((out / "adapter_model.safetensors").read_bytes())
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    "settings",
    [
        ({}, {"r": 2}),
        ({"use_rslora": True}, {"use_rslora": True, "r": 8}),
        ({"use_rslora": True}, {}),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 9}}, {"target_modules": ["q_proj", "embed_tokens"]}),
    ],
    ids=["ranks", "rslora", "mixed-scaling", "patterns-and-embedding"],
)  # fmt: skip
def test_cat_is_the_exact_sum(tmp_path, settings):
    base, adapters = save_adapters(tmp_path, *settings)
    expected: dict[str, torch.Tensor] = {}
    for path, weight in zip(adapters, WEIGHTS, strict=False):
        model = PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(base), path)
        for name, update in updates(model, "default").items():
            expected[name] = expected.get(name, torch.zeros_like(update)) + weight * update
    ours = combine(tmp_path, adapters, weights=WEIGHTS[: len(adapters)])
    assert_same_updates(base, ours, expected)


def test_the_combined_adapter_merges(tmp_path):
    base, adapters = save_adapters(tmp_path, {}, {"r": 2})
    ours = combine(tmp_path, adapters, weights=WEIGHTS[:2])
    workdir = tmp_path / "merge"
    workdir.mkdir()
    out = MERGE.run({"base": base, "adapter": ours}, MergeParams(), Context(workdir=workdir))["pytorch"]
    reference = peft_combined(base, adapters, "cat")
    assert (logits(load(out)) - logits(reference)).abs().max() < 1e-5


def refused(folder: Path, adapters: list[Path], **params: Any) -> ModelMergeError:
    with pytest.raises(ModelMergeError) as caught:
        combine(folder, adapters, **params)
    assert not list((folder / "work").iterdir())
    return caught.value


def test_weights_for_another_number_of_adapters(tmp_path):
    _, adapters = save_adapters(tmp_path, {}, {})
    assert refused(tmp_path, adapters, weights=(1.0,)).reason == "PARAMS_INVALID"


def test_mixing_factors_of_different_ranks(tmp_path):
    _, adapters = save_adapters(tmp_path, {}, {"r": 2})
    error = refused(tmp_path, adapters, combination_type="ties")
    assert error.reason == "ADAPTER_UNSUPPORTED"
    assert "cat" in error.remedy


def test_whole_tensors_are_never_dropped(tmp_path):
    _, adapters = save_adapters(tmp_path, {}, {"modules_to_save": ["lm_head"]})
    error = refused(tmp_path, adapters)
    assert error.reason == "ADAPTER_UNSUPPORTED"
    assert "lm_head" in error.about["tensor"]


def test_a_module_to_save_whose_tensors_are_lost_is_not_dropped(tmp_path):
    from safetensors.torch import load_file, save_file

    _, adapters = save_adapters(tmp_path, {}, {"modules_to_save": ["lm_head"]})
    path = adapters[1] / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(path).items() if "lm_head" not in key}, path)
    error = refused(tmp_path, adapters)
    assert error.reason == "ADAPTER_UNSUPPORTED"
    assert "modules_to_save" in error.message


def test_trained_biases_are_never_dropped_or_taken_whole(tmp_path):
    options = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    _, adapters = save_adapters(tmp_path, {**options, "bias": "lora_only"}, options, kind="gpt2")
    error = refused(tmp_path, adapters)
    assert error.reason == "ADAPTER_UNSUPPORTED"
    assert error.about["tensor"].endswith(".bias")


@pytest.mark.parametrize("base", [["a", "b"], {"x": 1}, 7])
def test_a_base_named_by_something_else_is_not_named(tmp_path, base):
    _, adapters = save_adapters(tmp_path, {}, {})
    path = adapters[1] / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": base}))
    assert (combine(tmp_path, adapters) / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_seeds_that_torch_does_not_take(seed):
    with pytest.raises(ValidationError):
        CombineParams(seed=seed)


def test_embeddings_saved_along_must_agree(tmp_path):
    from safetensors.torch import load_file, save_file

    _, adapters = save_adapters(tmp_path, *({"target_modules": ["q_proj", "embed_tokens"]},) * 2)
    tensors = load_file(adapters[1] / "adapter_model.safetensors")
    (name,) = [name for name in tensors if "lora_" not in name]
    tensors[name][3, 3] += 1
    save_file(tensors, adapters[1] / "adapter_model.safetensors")
    error = refused(tmp_path, adapters)
    assert (error.reason, error.about["tensor"]) == ("ADAPTER_BASE_MISMATCH", name)


def test_adapters_of_another_base(tmp_path):
    _, adapters = save_adapters(tmp_path, {}, {})
    other, _ = save_adapters(tmp_path / "other", {}, kind="gemma3")
    wide = tmp_path / "other/adapter-0"
    config = json.loads((wide / "adapter_config.json").read_text())
    tensors = {name: torch.ones(4, 24) if "_A" in name else torch.ones(32, 4) for name in names(wide)}
    from safetensors.torch import save_file

    save_file(tensors, wide / "adapter_model.safetensors")
    assert config["base_model_name_or_path"] == str(other)
    assert refused(tmp_path, [adapters[0], wide]).reason == "ADAPTER_BASE_MISMATCH"


def names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return sorted(file.keys())

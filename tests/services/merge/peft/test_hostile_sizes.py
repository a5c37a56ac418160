"""Numbers of ``adapter_config.json`` from which peft would build gigabytes: refused before anything of that size exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import slipway_merge.plan.peft_forms  # noqa: F401 - its libraries are not what a merge costs
from slipway.errors import ModelExportError, ModelMergeError
from slipway.model.safetensors_file import TensorInfo
from slipway_merge.peft.modules import BoundedMemory, most_bytes
from slipway_merge.plan.replication import replicate
from support.hostile.json_grammar import answer
from support.models.merge_forms import FORMS, save_form

REASONS = {
    "ADAPTER_CONFIG_INVALID",
    "ADAPTER_BASE_MISMATCH",
    "ADAPTER_UNSUPPORTED",
    "CHECKPOINT_INCOMPLETE",
    "ADAPTER_TENSOR_UNUSED",
}
SLIM = {"save_only_topk_weights": True}


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("vblora", {"num_vectors": 1_000_000}),
        ("vblora", {"num_vectors": 4096, "vector_length": 1, "r": 4096, **SLIM}),
        ("loha on Conv2d", {"r": 4096}),
        ("lokr on Conv2d", {"r": 4096, "decompose_factor": 1}),
        ("peanut", {"depth": 65_536}),
        ("peanut", {"depth": 256, "r": 4096}),
        ("oft", {"num_cayley_neumann_terms": 1_000_000}),
        ("psoft", {"psoft_svd_lowrank_niter": 1_000_000}),
        ("boft", {"boft_block_size": 0, "boft_block_num": 1_000_000}),
        ("tinylora", {"u": 4096, "r": 4096}),
        ("vera, projections not saved", {"r": 65_536}),
        ("randlora, projections not saved", {"r": 4096}),
        ("unilora", {"theta_d_length": 1_000_000, "r": 4096}),
        ("fourierft", {"n_frequency": 1_000_000}),
        ("waveft", {"n_frequency": 1_000_000}),
        ("monteclora", {"monteclora_config": {"num_samples": 1_000_000, "buffer_size": 1_000_000}}),
        ("bd-lora", {"use_bdlora": {"nblocks": 1_000_000, "target_modules_bd_a": ["q_proj"]}}),
    ],
    ids=str,
)
def test_no_number_of_a_configuration_takes_the_memory(tmp_path: Path, form: str, options: dict[str, Any]) -> None:
    case, _ = save_form(tmp_path, FORMS[form], torch.float32)
    path = case.adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))
    found = answer(lambda: case.merge(verify="spot"), seconds=2.0, megabytes=200)
    assert isinstance(found, ModelExportError)
    assert found.reason in REASONS


def numbers(config: dict[str, Any]) -> list[str]:
    return [key for key, value in config.items() if isinstance(value, int) and not isinstance(value, bool)]


#: Forms that peft builds with other code than the first one of their configuration.
BUILT_OTHERWISE = ["bd-lora", "dora", "kasa", "lora on Conv2d", "miss, mini", "monteclora", "pissa",
                   "randlora, projections not saved", "velora", "vera, projections not saved"]  # fmt: skip
#: The first form of each configuration that has a number.
FIRST = {form.config: name for name, form in reversed(FORMS.items()) if numbers(form.build().to_dict())}


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FIRST.values(), *BUILT_OTHERWISE])
def test_no_number_of_any_form_takes_long_or_much_memory(tmp_path: Path, form: str) -> None:
    case, _ = save_form(tmp_path, FORMS[form], torch.float32)
    path = case.adapter / "adapter_config.json"
    good = json.loads(path.read_text())
    falling = [[{key: value} for value in (1_000_000, 65_536, 4096)] for key in numbers(good)]
    together = [[dict.fromkeys(numbers(good), value) for value in (65_536, 4096)]]
    for place, attempts in enumerate([*falling, *together]):
        for number, options in enumerate(attempts):
            path.write_text(json.dumps({**good, **options}))
            case.workdir = tmp_path / f"work-{place}-{number}"
            case.workdir.mkdir()
            found = answer(lambda: case.merge(verify="spot"), seconds=5.0, megabytes=400)
            if not isinstance(found, ModelExportError):
                break  # nothing is built from so large a number, so nothing from a smaller one
            assert found.reason in REASONS


def test_repeated_layers_of_very_many_tensors_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    tensor = TensorInfo("x", "F32", (1,), tmp_path / "x", 0, 4)
    base = {f"model.layers.0.mlp.experts.{number}.weight": tensor for number in range(10_000)}
    found = answer(lambda: replicate(base, [0] * 4096))
    assert isinstance(found, ModelMergeError)
    assert (found.reason, "40960000 tensors" in found.message) == ("ADAPTER_UNSUPPORTED", True)
    assert len(replicate(base, [0] * 3)) == 30_000


def test_tensors_over_the_limit_are_not_made() -> None:
    def make(bytes_: int) -> None:
        torch.zeros(bytes_ // 4)
        torch.randn(bytes_ // 4, generator=torch.Generator())
        torch.randperm(bytes_ // 8)

    with BoundedMemory(most := 4 << 20):
        make(1 << 20)
        torch.empty(1 << 50, device="meta")
    for ask in (lambda: make(1 << 50), lambda: [make(1 << 19) for _ in range(1000)], lambda: torch.eye(1 << 30)):
        with pytest.raises(ModelMergeError, match=r"4\.2 MB of memory") as refused, BoundedMemory(most):
            ask()
        assert refused.value.reason == "ADAPTER_CONFIG_INVALID"


def test_a_real_layer_leaves_more_room_than_any_form_needs() -> None:
    """Of Llama 8B: the widest layer of its blocks for BOFT's permutations, and all of them together for FRoD."""
    with torch.device("meta"):
        down, query = torch.nn.Linear(14_336, 4096, bias=False), torch.nn.Linear(4096, 4096, bias=False)
    assert most_bytes([down]) > 8 * 4 * 14_336**2
    assert most_bytes([query] * 32) > 2.1 * 32 * 4 * 4096**2
    assert most_bytes([torch.nn.Linear(32, 32)]) < 100e6

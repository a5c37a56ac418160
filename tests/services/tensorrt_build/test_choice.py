"""Each machine gets the right builder, or a message that says what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from slipway.configuration.loading import parse
from slipway.errors import TensorRTBuildError
from slipway.machine.processors import Gpu, all_gpus
from slipway.model.configuration import ModelConfig
from slipway.planning.plan import plan
from slipway_tensorrt_build.builders import Choice, Machine, choose
from slipway_tensorrt_build.format import TensorRTConfiguration
from slipway_tensorrt_build.params import Range, TensorRTBuildParams
from slipway_tensorrt_build.profiles import describe_limited_ranges, plan_profile, positions_of
from slipway_tensorrt_build.stage import STAGE

H100 = Gpu("NVIDIA H100", "sm90")
ADA = Gpu("NVIDIA L4", "sm89")


def machine(*gpus: Gpu, tensorrt: str = "", rtx: str = "") -> Machine:
    return Machine(gpus=gpus, tensorrt=tensorrt, tensorrt_rtx=rtx)


@pytest.mark.parametrize(
    ("here", "params", "expected"),
    [
        (machine(rtx="1.7"), {"targets": ("sm89", "sm120")}, Choice("tensorrt_rtx", "1.7", ("sm89", "sm120"))),
        (machine(ADA, rtx="1.7"), {}, Choice("tensorrt_rtx", "1.7", ("sm89",))),
        (machine(H100, tensorrt="10.13", rtx="1.7"), {}, Choice("tensorrt", "10.13", ("sm90",))),
        (machine(H100, tensorrt="10.13"), {"targets": ("sm90",)}, Choice("tensorrt", "10.13", ("sm90",))),
        (machine(H100, tensorrt="10.13", rtx="1.7"), {"targets": ("sm89",)}, Choice("tensorrt_rtx", "1.7", ("sm89",))),
        (
            machine(ADA, tensorrt="10.13", rtx="1.7"),
            {"builder": "tensorrt_rtx"},
            Choice("tensorrt_rtx", "1.7", ("sm89",)),
        ),
        (machine(ADA, ADA, tensorrt="10.13"), {}, Choice("tensorrt", "10.13", ("sm89",))),
        (machine(tensorrt="10.13", rtx="1.7"), {"targets": ("sm86",)}, Choice("tensorrt_rtx", "1.7", ("sm86",))),
    ],
)
def test_choice(here: Machine, params: dict[str, object], expected: Choice) -> None:
    assert choose(TensorRTBuildParams(**params), here) == expected


@pytest.mark.parametrize(
    ("here", "params", "reason", "says"),
    [
        (machine(rtx="1.7"), {}, "UNSUPPORTED", "targets: [sm89]"),
        (machine(), {"targets": ("sm89",)}, "UNSUPPORTED", "slipway-ml[tensorrt_build]"),
        (machine(tensorrt="10.13"), {}, "UNSUPPORTED", "needs an NVIDIA GPU" ),
        (machine(rtx="1.7"), {"builder": "tensorrt"}, "UNSUPPORTED", "tensorrt is not installed and no NVIDIA GPU"),
        (machine(ADA, rtx="1.7"), {"builder": "tensorrt"}, "UNSUPPORTED", "slipway-ml[tensorrt]"),
        (machine(rtx="1.7"), {"targets": ("sm90",)}, "TENSORRT_TARGET_UNSUPPORTED", "data-centre"),
        (machine(H100, rtx="1.7"), {}, "TENSORRT_TARGET_UNSUPPORTED", "sm90"),
        (machine(H100, tensorrt="10.13"), {"builder": "tensorrt", "targets": ("sm89",)}, "TENSORRT_TARGET_UNSUPPORTED", "H100"),
    ],
)  # fmt: skip
def test_refusal(here: Machine, params: dict[str, object], reason: str, says: str) -> None:
    with pytest.raises(TensorRTBuildError) as caught:
        choose(TensorRTBuildParams(**params), here)
    assert caught.value.reason == reason
    assert says in str(caught.value)
    assert caught.value.remedy


def test_probe_tells_what_is_here_without_loading_a_library() -> None:
    code = (
        "import sys; from slipway_tensorrt_build.stage import STAGE; print([(p.name, p.available) for p in "
        "STAGE.providers()], sorted(set(sys.modules) & {'tensorrt', 'tensorrt_rtx', 'onnx', 'torch', 'numpy'}))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("[('tensorrt', ")
    assert printed.rstrip().endswith("[]")
    by_name = {provider.name: provider for provider in STAGE.providers()}
    assert by_name["tensorrt-rtx"].available == bool(by_name["tensorrt-rtx"].version)
    if not all_gpus():
        assert not by_name["tensorrt"].available
        assert "GPU" in by_name["tensorrt"].detail


@pytest.mark.parametrize(
    "bad",
    [
        {"targets": ("8.9",)},
        {"targets": ("SM89",)},
        {"targets": ("../sm89",)},
        {"targets": ("sm012",)},
        {"batch": {"min": 0, "opt": 1, "max": 1}},
        {"sequence": {"min": 4, "opt": 2, "max": 8}},
        {"builder": "trt"},
        {"target": ("sm89",)},
    ],
)
def test_params_refuse_what_cannot_be(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TensorRTBuildParams.model_validate(bad)


@pytest.mark.parametrize("target", ["sm012", "8.9", "SM89", "sm1", "sm1234"])
def test_the_configuration_refuses_the_same_targets(target: str) -> None:
    """So a target is refused before anything runs, and not by the stage after hours of other work."""
    with pytest.raises(ValidationError, match="not a GPU architecture"):
        TensorRTConfiguration(targets=(target,))
    with pytest.raises(ValidationError, match="not a GPU architecture"):
        TensorRTBuildParams(targets=(target,))


def test_params_come_from_json() -> None:
    params = TensorRTBuildParams.model_validate_json(
        '{"targets": ["sm89", "sm89"], "past": {"min": 0, "opt": 8, "max": 16}}'
    )
    assert params.targets == ("sm89",)
    assert params.past == Range(min=0, opt=8, max=16)


def test_fixed_axes_stay_and_unknown_dynamic_axes_are_named() -> None:
    profile = plan_profile({"input_ids": (1, -1)}, TensorRTBuildParams(), positions=4096)
    assert (profile["input_ids"].min, profile["input_ids"].max) == ((1, 1), (1, 512))
    with pytest.raises(TensorRTBuildError) as caught:
        plan_profile({"pixel_values": (-1, 3, -1, -1)}, TensorRTBuildParams(), positions=4096)
    assert caught.value.about == {"input": "pixel_values", "axis": "2"}


def test_ranges_outside_the_positions_or_a_fixed_axis_are_refused() -> None:
    mask = {"attention_mask": (-1, -1), "past_key_values.0.key": (-1, 2, -1, 8)}
    late = TensorRTBuildParams(sequence=Range(min=2, opt=64, max=64), past=Range(min=15, opt=64, max=64))
    plan_profile(mask, late, positions=17)  # the smallest call just fits
    with pytest.raises(TensorRTBuildError, match="smallest call has 17 tokens") as caught:
        plan_profile(mask, late, positions=16)
    assert caught.value.reason == "TENSORRT_PROFILE_INVALID"

    encoder = {"input_ids": (-1, -1), "attention_mask": (-1, -1)}
    plan_profile(encoder, late, positions=2)  # it has no past
    with pytest.raises(TensorRTBuildError, match="smallest call has 2 tokens"):
        plan_profile(encoder, late, positions=1)

    rows = TensorRTBuildParams(batch=Range(min=2, opt=2, max=4))
    for size in (2, 4):
        plan_profile({"input_ids": (size, -1)}, rows, positions=4096)
    for size in (1, 5):
        with pytest.raises(TensorRTBuildError, match="is not dynamic") as caught:
            plan_profile({"input_ids": (size, -1)}, rows, positions=4096)
        assert caught.value.reason == "TENSORRT_PROFILE_INVALID"
        assert caught.value.about == {"input": "input_ids", "axis": "0", "size": str(size)}


@pytest.mark.parametrize(
    ("positions", "architecture", "told"),
    [
        (17, "Qwen3ForCausalLM", ""),
        (16, "Qwen3ForCausalLM", "17 tokens (2 of sequence, 15 of past), and the model has 16"),
        (2, "BertForSequenceClassification", ""),
        (1, "BertForSequenceClassification", "2 tokens (2 of sequence, 0 of past), and the model has 1"),
    ],
)
def test_ranges_beyond_the_positions_are_refused_by_the_plan(positions: int, architecture: str, told: str) -> None:
    """Before the graph is exported, of which the ranges are asked again."""
    section = {"enabled": True, "targets": ["sm89"], "sequence": [2, 64, 64], "past": [15, 64, 64]}
    [task] = [
        task
        for task in plan(parse({"formats": {"tensorrt": section}}), ("base", "adapter"))
        if task.stage == STAGE.name
    ]
    model_type = "qwen3" if "Qwen3" in architecture else "bert"
    config = ModelConfig(
        {"model_type": model_type, "architectures": [architecture], "max_position_embeddings": positions}
    )
    if not told:
        assert STAGE.forecast.describes(task.call.params_of(STAGE), config) is None
        return
    with pytest.raises(TensorRTBuildError) as caught:
        STAGE.forecast.describes(task.call.params_of(STAGE), config)
    assert told in caught.value.message
    assert caught.value.reason == "TENSORRT_PROFILE_INVALID"


def test_sizes_beyond_the_positions_are_named() -> None:
    params = TensorRTBuildParams(sequence=Range(min=1, opt=64, max=512), past=Range(min=0, opt=8, max=256))
    assert describe_limited_ranges(params, 512, cached=True) == ""
    said = "the model has 256 positions: sequence.max of 512 becomes 256"
    assert describe_limited_ranges(params, 256, cached=False) == said
    assert describe_limited_ranges(params, 256, cached=True) == f"{said}, past.max of 256 becomes 255"


def test_positions_behind_padding_are_not_counted() -> None:
    assert positions_of({"model_type": "roberta", "max_position_embeddings": 514}) == 512
    assert positions_of({"model_type": "gpt2", "n_positions": 1024}) == 1024
    assert positions_of({"model_type": "qwen3"}) > 1 << 20

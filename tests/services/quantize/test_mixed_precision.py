"""A size budget: bits go where they matter most, the same in both formats, and a budget that cannot be met is refused."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.torch import load_file

from slipway.errors import QuantizationError
from slipway.stage import Context
from slipway_quantize.grid.mixed import Option, choose_options, importance_by_place, smallest_size
from slipway_quantize.params import QuantizeParams
from slipway_quantize.report import weight_bytes
from slipway_quantize.stage import STAGE
from support.models.calibrations import write_calibration
from support.models.quantize_models import divergence, onnx_logits, prompt, torch_logits

Quantize = Callable[..., tuple[Path, Context]]
HEAD, Q = "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"


def best(items: list[list[Option]], room: int) -> float | None:
    """The smallest error of any choice that fits, found by trying all."""
    fitting = [chosen for chosen in itertools.product(*items) if sum(each.size for each in chosen) <= room]
    return min((sum(each.error for each in chosen) for chosen in fitting), default=None)


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_between_the_bound_and_the_best_of_all(seed: int) -> None:
    chance = random.Random(seed)
    items = [[Option(chance.randint(1, 40), chance.random()) for _ in range(chance.randint(1, 3))] for _ in range(6)]
    for room in (*range(smallest_size(items) - 1, 200, 7), 10_000):
        found, exact = choose_options(items, room=room), best(items, room)
        if found is None or exact is None:
            assert found is None
            assert exact is None
            continue
        chosen = [options[index] for options, index in zip(items, found.chosen, strict=True)]
        assert found.size == sum(each.size for each in chosen) <= room
        assert found.error == pytest.approx(sum(each.error for each in chosen), abs=1e-9)
        assert found.bound <= exact + 1e-9 <= found.error + 2e-9
    assert found is not None
    assert found.error == pytest.approx(found.bound), "with room for everything, nothing is lost"


def test_bytes_go_where_they_save_most() -> None:
    items = [[Option(10, 1.0), Option(20, 0.0)], [Option(10, 5.0), Option(20, 0.0)], [Option(10, 3.0), Option(60, 0.0)]]
    assert [choose_options(items, room=room).chosen for room in (30, 40, 50, 100)] == [  # type: ignore[union-attr]
        (0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "quantization.json").read_text())
    return found


@pytest.fixture(scope="module")
def sources(tiny: Path, tiny_onnx: Path) -> dict[str, Path]:
    return {"pytorch": tiny, "onnx": tiny_onnx}


@pytest.mark.parametrize("kind", ["pytorch", "onnx"])
def test_a_budget_is_kept_and_lies_between_the_levels(quantize: Quantize, sources: dict[str, Path], kind: str) -> None:
    source, tokens = sources[kind], prompt()
    logits = torch_logits if kind == "pytorch" else onnx_logits
    exact, sizes, errors = logits(source, tokens), {}, {}
    for level in ("int4", "int8"):
        made, _ = quantize(source, format=kind, level=level, head_bits=4, check=False)
        sizes[level], errors[level] = weight_bytes(made), divergence(exact, logits(made, tokens))[0]
    budget = (sizes["int4"] + sizes["int8"]) // 2
    made, ctx = quantize(source, format=kind, level="int4", head_bits=4, size_budget_bytes=budget)
    described = report(made)
    assert ctx.facts["check"] == "passed"
    assert sizes["int4"] < weight_bytes(made) <= budget
    assert errors["int8"] < divergence(exact, logits(made, tokens))[0] < errors["int4"]
    assert set(described["tensors"]["bits"].values()) == {4, 8}
    assert described["mixed"] is True
    facts = described["mixed_precision"]
    assert facts["size_budget_bytes"] == budget
    assert facts["sensitivity"] == "weights alone"
    assert facts["error_bound"] <= facts["error"]


def test_what_is_stored_is_what_the_report_says(quantize: Quantize, sources: dict[str, Path]) -> None:
    """With a budget of 0.9 of the size in 16 bits, some weights have 8 bits, if not all."""
    made, _ = quantize(
        sources["pytorch"], format="pytorch", level="int4", head_bits=4, size_budget_share=0.9, check=False
    )
    bits, stored = report(made)["tensors"]["bits"], load_file(made / "model.safetensors")
    for name, of in bits.items():
        columns = load_file(sources["pytorch"] / "model.safetensors").get(name)
        if columns is not None:
            assert stored[f"{name}_packed"].shape[1] == columns.shape[1] * of // 32
    groups = json.loads((made / "config.json").read_text())["quantization_config"]["config_groups"]
    wide = next(each for each in groups.values() if each["weights"]["num_bits"] == 8)
    assert wide["targets"] == sorted(name.removesuffix(".weight") for name, of in bits.items() if of == 8)
    graph, _ = quantize(sources["onnx"], format="onnx", level="int4", head_bits=4, size_budget_share=0.9, check=False)
    nodes = {
        next(name for name in node.input if ".q" in name).rpartition(".q")[0]: next(
            each.i for each in node.attribute if each.name == "bits"
        )
        for node in onnx.load(graph / "model.onnx", load_external_data=False).graph.node
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized")
    }
    assert nodes == report(graph)["tensors"]["bits"]


@pytest.mark.parametrize("kind", ["pytorch", "onnx"])
def test_a_budget_that_cannot_be_met_is_refused_with_the_least_size(
    quantize: Quantize, sources: dict[str, Path], kind: str
) -> None:
    with pytest.raises(QuantizationError) as raised:
        quantize(sources[kind], format=kind, level="int4", head_bits=4, size_budget_bytes=1000)
    assert raised.value.reason == "SIZE_BUDGET_UNMET"
    least = int(raised.value.about["smallest_bytes"])
    assert str(least) in raised.value.remedy
    made, _ = quantize(sources[kind], format=kind, level="int4", head_bits=4, size_budget_bytes=least, check=False)
    assert weight_bytes(made) <= least
    assert set(report(made)["tensors"]["bits"].values()) == {4}


def test_measured_sensitivity_decides_in_both_formats(
    sources: dict[str, Path], tmp_path: Path, quantize: Quantize
) -> None:
    """One set of layers is said to add nearly all of the divergence: it gets 8 bits, and what vLLM joins with it has the same."""
    calibration = write_calibration(sources["pytorch"], tmp_path / "calibration")
    path = calibration / "calibration.json"
    described = json.loads(path.read_text())
    for name, entry in described["weights"].items():
        entry["divergence"] = 1.0 if name == Q else 1e-9
    path.write_text(json.dumps(described))
    for kind, source in sources.items():
        plain, _ = quantize(source, format=kind, level="int4", head_bits=4, check=False)
        wide, _ = quantize(source, format=kind, level="int8", head_bits=4, check=False)
        budget = weight_bytes(plain) + (weight_bytes(wide) - weight_bytes(plain)) // 2
        workdir = tmp_path / kind
        workdir.mkdir()
        params = QuantizeParams(format=kind, level="int4", head_bits=4, size_budget_bytes=budget, check=False)
        inputs = {"model": source, "calibration": calibration}
        made = STAGE.run(inputs, params, Context(workdir=workdir))["model"]
        described = report(made)
        bits = {name.removesuffix(".T"): of for name, of in described["tensors"]["bits"].items()}
        assert described["mixed_precision"]["sensitivity"] == "held-out divergence"
        assert [bits[Q.replace("q_proj", each)] for each in ("q_proj", "k_proj", "v_proj")] == [8, 8, 8]
        methods = {name.removesuffix(".T"): how for name, how in described["tensors"]["methods"].items()}
        assert methods[Q] == "rtn", "the calibration has codes of 4 bits"
        assert "gptq" in methods.values()


def test_the_widest_level_ignores_a_budget(quantize: Quantize, sources: dict[str, Path]) -> None:
    """An output that is made again at a wider level keeps its parameters."""
    made, _ = quantize(sources["pytorch"], format="pytorch", level="int8", size_budget_bytes=1000, check=False)
    assert "mixed" not in report(made)
    assert np.isfinite(torch_logits(made, prompt())).all()


@pytest.mark.parametrize("kind", ["pytorch", "onnx"])
def test_without_a_calibration_the_weights_alone_say_which_are_wide(
    quantize: Quantize, sources: dict[str, Path], kind: str
) -> None:
    """A share of the way from the smallest to the largest size is taken; joined layers have the same bits."""
    plain, _ = quantize(sources[kind], format=kind, level="int4", check=False)
    made, _ = quantize(sources[kind], format=kind, level="int4", wide_share=0.4)
    bits = {name.removesuffix(".T"): of for name, of in report(made)["tensors"]["bits"].items()}
    layers = {name: of for name, of in bits.items() if "proj" in name}
    assert set(layers.values()) == {4, 8}
    for joined in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        assert all(
            len({of for name, of in layers.items() if f"layers.{layer}." in name and name.split(".")[-2] in joined})
            == 1
            for layer in range(2)
        )
    widest, _ = quantize(sources[kind], format=kind, level="int8", check=False)
    assert weight_bytes(plain) < weight_bytes(made) < weight_bytes(widest)
    assert report(made)["mixed_precision"]["sensitivity"] == "weights alone"


def test_values_second_products_and_outer_layers_are_preferred() -> None:
    names = [f"layers.{layer}.{name}.weight" for layer in range(8) for name in ("q_proj", "v_proj", "down_proj")]
    found = importance_by_place([*names, "other.weight"])
    assert found["layers.4.v_proj.weight"] == found["layers.4.down_proj.weight"] > found["layers.4.q_proj.weight"]
    assert found["layers.0.q_proj.weight"] == found["layers.7.q_proj.weight"] > found["layers.4.q_proj.weight"]
    assert found["layers.4.q_proj.weight"] == found["other.weight"] == 1

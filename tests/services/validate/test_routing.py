"""Which experts a mixture chooses: recorded as its own class computes them, compared, and told."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.proof.transformers_runtime import load
from slipway.stage import Context
from slipway.validation.parts import Routing
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE as MERGE
from slipway_validate.judging.distances import LIMITS
from slipway_validate.judging.evaluate import Evaluator
from slipway_validate.judging.routing import compare_base_routes, compare_routes
from slipway_validate.protocol.routes import ROUTES_FILE, read_routes
from slipway_validate.reference.running import describe
from slipway_validate.runner.routing import record_routes
from support.models.current_kinds import Kind, make_kind
from support.models.validated_here import Validated

TOKENS = torch.arange(40).reshape(2, 20) % 50


def choices(values: Sequence[Sequence[Sequence[int]]], path: Path) -> Path:
    """Write choices (layers, tokens, experts of a token)."""
    path.parent.mkdir(exist_ok=True)
    np.save(path, np.array(values, np.uint16))
    return path.parent


@pytest.mark.parametrize("name", ["mixtral", "qwen3.5-moe"])
def test_choices_are_those_of_the_largest_router_logits(tmp_path: Path, name: str) -> None:
    model = load(make_kind(name, tmp_path / "kind").base, threads=1)
    with record_routes(model, tmp_path / ROUTES_FILE), torch.no_grad():
        given = model.module(input_ids=TOKENS, output_router_logits=True)
    routes = read_routes(tmp_path / ROUTES_FILE)
    assert routes is not None
    layers, tokens, experts = routes.shape
    assert (layers, tokens) == (len(given.router_logits), TOKENS.numel())
    largest = [logits.topk(experts).indices.sort().values.numpy() for logits in given.router_logits]
    np.testing.assert_array_equal(routes, np.stack(largest))


@pytest.mark.parametrize(
    "name", ["gpt-oss", "deepseek-v3", "glm4-moe", "nemotron-h-moe", "granite-moe", "lfm2-moe", "gemma4-moe"]
)
def test_every_kind_of_router_is_recorded(tmp_path: Path, name: str) -> None:
    model = load(make_kind(name, tmp_path / "kind").base, threads=1)
    with record_routes(model, tmp_path / ROUTES_FILE), torch.no_grad():
        model.module(input_ids=TOKENS)
    routes = read_routes(tmp_path / ROUTES_FILE)
    assert routes is not None
    assert routes.shape[1] == TOKENS.numel()
    assert len(np.unique(routes)) > routes.shape[2]  # not the same experts for each token


def test_a_model_without_experts_has_no_choices(tmp_path: Path) -> None:
    model = load(make_kind("ministral3", tmp_path / "kind").base, threads=1)
    with record_routes(model, tmp_path / ROUTES_FILE), torch.no_grad():
        model.module(input_ids=TOKENS)
    assert read_routes(tmp_path / ROUTES_FILE) is None
    assert not [hook for part in model.module.modules() for hook in part._forward_pre_hooks]


def test_shares_count_choices_and_name_the_worst_layer(tmp_path: Path) -> None:
    reference = choices([[[0, 1], [2, 3]], [[0, 1], [2, 3]]], tmp_path / "reference" / ROUTES_FILE)
    run = choices([[[0, 1], [2, 3]], [[1, 2], [0, 1]]], tmp_path / "run" / ROUTES_FILE)
    compared = compare_routes(reference, run)
    assert compared == Routing(layers=2, tokens=2, experts=2, equal=0.625, lowest=0.25, lowest_layer=1)
    assert compared.said == (
        "routing: 62.5 % of its choices of experts are those of base + adapter, 25.0 % in the layer with the fewest (2 of 2)"
    )
    almost = compared.model_copy(update={"equal": 0.99999, "lowest": 0.99999})
    assert "99.9 % of its choices" in almost.said


def test_what_cannot_be_compared_is_not(tmp_path: Path) -> None:
    reference = choices([[[0, 1], [2, 3]]], tmp_path / "reference" / ROUTES_FILE)
    assert compare_routes(reference, tmp_path / "nothing") is None
    assert compare_base_routes(reference) is None
    other = choices([[[0], [2]]], tmp_path / "other" / ROUTES_FILE)
    assert compare_routes(reference, other) is None
    (tmp_path / "odd").mkdir()
    np.save(tmp_path / "odd" / ROUTES_FILE, np.array([["a"]], object))
    assert compare_routes(reference, tmp_path / "odd") is None
    with pytest.raises(ValueError, match="shape"):
        read_routes(choices([[[]]], tmp_path / "empty" / ROUTES_FILE) / ROUTES_FILE)


def test_more_choices_for_a_token_than_any_model_makes_are_refused(tmp_path: Path) -> None:
    """All choices of a token are compared with each other."""
    most = choices([[list(range(256))] * 2], tmp_path / "most" / ROUTES_FILE)
    compared = compare_routes(most, most)
    assert compared is not None
    assert compared.equal == 1.0
    with pytest.raises(ValueError, match=r"the shape \(1, 2, 257\)"):
        read_routes(choices([[list(range(257))] * 2], tmp_path / "beyond" / ROUTES_FILE) / ROUTES_FILE)


def merged(kind: Kind, work: Path) -> Path:
    """Merge a kind."""
    work.mkdir()
    return MERGE.run({"base": kind.base, "adapter": kind.adapter}, MergeParams(verify="spot"), Context(workdir=work))[
        "pytorch"
    ]


def test_a_validation_tells_how_many_choices_are_equal(tmp_path: Path) -> None:
    kind = make_kind("qwen3.5-moe", tmp_path / "kind", dtype=torch.float32)
    right = merged(kind, tmp_path / "merge")
    wrong = shutil.copytree(right, tmp_path / "wrong")
    tensors = load_file(wrong / "model.safetensors")
    router = next(name for name in sorted(tensors) if name.endswith("mlp.gate.weight"))
    tensors[router] = tensors[router].flip(0).contiguous()
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "work").mkdir()
    run = Validated(kind.base, kind.adapter, tmp_path / "work", merged=right)
    run.evaluator = Evaluator(run.reference, run.prepared.family, LIMITS, decode=lambda _: "")
    routing, other = (
        run.output(name, folder).routing for name, folder in {"pytorch": right, "pytorch-bf16": wrong}.items()
    )
    assert routing is not None
    assert other is not None
    assert routing.equal > 0.99
    assert other.lowest < 0.9
    assert other.lowest_layer == 0
    moved = describe(run.reference, None).routing
    assert moved is not None
    assert moved.equal < routing.equal  # the adapter is on the router too

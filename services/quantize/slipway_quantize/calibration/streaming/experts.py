"""Experts that compute one by one with weights that stay in their files, so that each is observed and rounded like any other layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipway.errors import QuantizationError
from slipway.model.safetensors_file import TensorInfo
from slipway.stage import Context
from slipway.texts import counted
from slipway_quantize.calibration.streaming.layers import Layer
from slipway_quantize.experts import EXPERT
from slipway_quantize.model_weights import LinearWeight, map_tensor

_PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
"""Place of an expert's matrix among gate, up and down, by its name."""
_STACKS = ("gate_up_proj", "down_proj")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_SHOWN = 8


class Experts:
    """The experts of a block of a transformers model.

    Args:
        module: Their module; its ``forward`` is replaced, and its stacks are dropped.
        matrices: Gate, up and down of each expert.
    """

    def __init__(self, module: Any, matrices: Sequence[tuple[Layer, Layer, Layer]]) -> None:
        self._module, self._matrices = module, matrices
        for name in _STACKS:
            module._parameters[name] = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        module.forward = self._forward

    def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums of the results of each position's experts. (positions, H), (positions, k), (positions, k)."""
        results = torch.zeros_like(hidden_states)
        for number, (gate, up, down) in enumerate(self._matrices):
            positions, places = torch.where(top_k_index == number)
            if not len(positions):
                continue
            inputs = hidden_states[positions]  # one tensor, so that gate and up share what is observed of it
            inner = self._module._apply_gate(torch.cat([gate.forward(inputs), up.forward(inputs)], dim=-1))
            weighted = down.forward(inner) * top_k_weights[positions, places, None]
            results = results.index_add(0, positions, weighted.to(results.dtype))
        return results


def put_experts(model: Any, experts: Sequence[LinearWeight], tensors: Mapping[str, TensorInfo]) -> dict[str, Layer]:
    """Let a model's experts compute with their stored matrices; return the layers by the names of their weights.

    Args:
        model: The model.
        experts: Matrices of experts that are tensors of their own.
        tensors: The tensors of the checkpoint.

    Raises:
        ValueError: The experts of this class compute otherwise, or some are missing; the message says what is in the way.
    """
    stored: dict[int, dict[int, dict[int, LinearWeight]]] = defaultdict(lambda: defaultdict(dict))
    for weight in experts:
        named, layer = EXPERT.fullmatch(weight.module), _LAYER.search(weight.module)
        if named is None or layer is None or named["projection"] not in _PARTS:
            raise ValueError(f"the expert {weight.module!r} has a matrix of an unknown kind")
        stored[int(layer[1])][int(named["number"])][_PARTS[named["projection"]]] = weight
    made: dict[str, Layer] = {}
    for path, module in model.named_modules():
        layer = _LAYER.search(f"{path}.")
        if layer is None or not set(_STACKS) <= module._parameters.keys():
            continue
        _require_known(module)
        own = stored.get(int(layer[1]), {})
        matrices = []
        for number in range(module.num_experts):
            parts = own.get(number, {})
            if len(parts) != len(set(_PARTS.values())):
                raise ValueError(f"no file has all matrices of expert {number} of {path!r}")
            matrices.append(tuple(_layer(parts[place], tensors) for place in sorted(parts)))
        Experts(module, matrices)  # type: ignore[arg-type]  # three in each, as was just checked
        made |= {layer.name: layer for expert in matrices for layer in expert}
    return made


def _layer(weight: LinearWeight, tensors: Mapping[str, TensorInfo]) -> Layer:
    info = tensors[weight.source]
    module = torch.nn.Linear(info.shape[1], info.shape[0], bias=False, device="meta")
    return Layer(f"{weight.module}.weight", module, map_tensor(info))


def _require_known(module: Any) -> None:
    """Refuse experts that compute otherwise than by gate, up and down, without biases."""
    known = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    odd = [name for name, value in known.items() if getattr(module, name, None) is not value]
    if odd or getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"experts of the class {type(module).__name__} compute in a way that is not known here")


def unreached(names: Iterable[str], reached: Collection[str]) -> dict[int, list[int]]:
    """Return the numbers of experts that no text has reached, by layer.

    Args:
        names: Names of the matrices of all experts.
        reached: Names of the layers that text has reached.
    """
    missed: dict[int, set[int]] = defaultdict(set)
    for name in names:
        named, layer = EXPERT.match(name), _LAYER.search(name)
        if name not in reached and named is not None and layer is not None:
            missed[int(layer[1])].add(int(named["number"]))
    return {layer: sorted(numbers) for layer, numbers in sorted(missed.items())}


def report_unreached(names: Collection[str], reached: Collection[str], then: str, ctx: Context) -> dict[str, Any]:
    """Warn about experts that no text has reached; return the facts, none for a model without experts.

    Args:
        names: Names of the matrices of all experts.
        reached: Names of the layers that text has reached.
        then: What becomes of these experts, for the warning.
        ctx: Context of the stage.
    """
    if not names:
        return {}
    missed, total = unreached(names, reached), sum(map(len, unreached(names, ()).values()))
    count = sum(map(len, missed.values()))
    if count:
        shown = "; ".join(
            f"layer {layer}: {', '.join(map(str, numbers[:_SHOWN]))}{' …' if len(numbers) > _SHOWN else ''}"
            for layer, numbers in list(missed.items())[:_SHOWN]
        )
        more = " …" if len(missed) > _SHOWN else ""
        ctx.warn(
            f"the text reached {total - count} of {counted(total, 'expert')}, and not {shown}{more}: {then}; give more text"
        )
    facts = {"experts": total, "experts_unreached": count}
    return facts | ({"unreached": {str(layer): numbers for layer, numbers in missed.items()}} if missed else {})


def require_mixture_known(method: str, *, symmetric: bool) -> None:
    """Refuse what is not calibrated of a mixture.

    Raises:
        QuantizationError: ``CALIBRATION_UNSUPPORTED``.
    """
    why = ""
    if method == "autoround":
        why = "method autoround moves all weights by gradients, which an expert without text has not: use auto or gptq"
    elif not symmetric:
        why = "vLLM and transformers read experts without zero points alone: leave symmetric true"
    if why:
        raise QuantizationError(
            f"a mixture of experts is not calibrated so: {why}",
            reason="CALIBRATION_UNSUPPORTED",
            remedy=why.rpartition(": ")[2],
            about={"method": method, "symmetric": symmetric},
        )

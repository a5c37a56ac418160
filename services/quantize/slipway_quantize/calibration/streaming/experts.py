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
from slipway_quantize.layers.structure import LinearWeight
from slipway_quantize.model_weights import map_tensor

_GATE, _UP, _DOWN = 0, 1, 2
_PARTS = {"gate_proj": _GATE, "w1": _GATE, "up_proj": _UP, "w3": _UP, "down_proj": _DOWN, "w2": _DOWN}
"""What an expert's matrix is, by its name."""
_GATED, _PLAIN = ("gate_up_proj", "down_proj"), ("up_proj", "down_proj")
"""Stacks of a module of experts, with gates and without (Nemotron-H)."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_SHOWN = 8


class Experts:
    """The experts of a block of a transformers model.

    Args:
        module: Their module; its ``forward`` is replaced, and its stacks are dropped.
        matrices: Gate (if the experts have one), up and down of each expert.
    """

    def __init__(self, module: Any, matrices: Sequence[Mapping[int, Layer]]) -> None:
        self._module, self._matrices = module, matrices
        for name in _stacks(module):
            module._parameters[name] = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        module.forward = self._forward

    def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums of the results of each position's experts. (positions, H), (positions, k), (positions, k)."""
        results = torch.zeros_like(hidden_states)
        for number, matrices in enumerate(self._matrices):
            positions, places = torch.where(top_k_index == number)
            if not len(positions):
                continue
            inner = self._activate(matrices, hidden_states[positions])
            weighted = matrices[_DOWN].forward(inner) * top_k_weights[positions, places, None]
            results = results.index_add(0, positions, weighted.to(results.dtype))
        return results

    def _activate(self, matrices: Mapping[int, Layer], inputs: Tensor) -> Tensor:
        """Return what an expert's second product gets. (positions, H) → (positions, I)."""
        up = matrices[_UP].forward(inputs)
        if _GATE not in matrices:
            activated: Tensor = self._module.act_fn(up)
            return activated
        # The same tensor, so that gate and up share what is observed of it.
        gated: Tensor = self._module._apply_gate(torch.cat([matrices[_GATE].forward(inputs), up], dim=-1))
        return gated


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
        if layer is None or not _stacks(module):
            continue
        _require_known(module)
        own = stored.get(int(layer[1]), {})
        wanted = {_GATE, _UP, _DOWN} if module.has_gate else {_UP, _DOWN}
        matrices = []
        for number in range(module.num_experts):
            parts = own.get(number, {})
            if parts.keys() != wanted:
                raise ValueError(f"no file has all matrices of expert {number} of {path!r}")
            matrices.append({part: _layer(parts[part], tensors, f"{path}.{number}") for part in sorted(parts)})
        Experts(module, matrices)
        made |= {layer.name: layer for expert in matrices for layer in expert.values()}
    return made


def _stacks(module: Any) -> tuple[str, ...]:
    """Return the names of a module's stacks of experts; none for another module."""
    if getattr(module, "num_experts", None) is None:
        return ()
    return next((names for names in (_GATED, _PLAIN) if set(names) <= module._parameters.keys()), ())


def _layer(weight: LinearWeight, tensors: Mapping[str, TensorInfo], place: str) -> Layer:
    info = tensors[weight.source]
    module = torch.nn.Linear(info.shape[1], info.shape[0], bias=False, device="meta")
    return Layer(f"{weight.module}.weight", module, map_tensor(info), place=place)


def _require_known(module: Any) -> None:
    """Refuse experts that compute otherwise than by up and down, with a gate or without, and without biases."""
    known = {"has_gate": _stacks(module) == _GATED, "has_bias": False, "is_transposed": False}
    known |= {"is_concatenated": True} if known["has_gate"] else {}
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

"""Build a transformers model that can be traced without weights, and run it once to learn the shapes of its results.

Its ALiBi biases and mixtures of experts have forms that engines can write; the traced form of experts does not depend on which experts
the tokens choose. The run leaves the model as it was.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import NormalDist
from typing import Any, TypeVar

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from slipway.errors import ONNXExportError
from slipway.machine.shortages import is_out_of_memory
from slipway.model.pytorch.traced_rotary import compute_frequencies_in_graph
from slipway_onnx_export.loading.cache_names import accept_past
from slipway_onnx_export.loading.conversion import Weight, loaded_weights
from slipway_onnx_export.source import ModelSource

NAME = "every_expert"

_T = TypeVar("_T")
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def build_weightless(source: ModelSource, *, engine: str, attention: tuple[str, ...]) -> Any:
    """Build the source's architecture with real buffers, and weights that are views of a single zero.

    Args:
        source: The model's folder; its weights are not read.
        engine: Name for the error's ``about``.
        attention: transformers' attention implementations; the first that the architecture supports is used.

    Raises:
        ONNXExportError: ``EXPORT_ENGINE_UNSUPPORTED`` if transformers has no class of the model's family for it, ``BASE_MODEL_INVALID`` if nothing
            can be built with the sizes in its configuration.
    """
    for implementation in attention:
        try:
            with _put_parameters_on_meta():
                model = source.loader.from_config(
                    source.config, dtype=torch.float32, attn_implementation=implementation, trust_remote_code=False
                ).eval()
            break
        except (ValueError, TypeError, ImportError) as error:
            failure = error
        except Exception as error:  # the model's code fails on impossible sizes
            if is_out_of_memory(error):
                raise
            raise ONNXExportError(
                f"{source.architecture} cannot be built from its configuration: {type(error).__name__}: {error}",
                reason="BASE_MODEL_INVALID",
                remedy="give a model whose config.json fits its weights",
                about={"file": "config.json", "architecture": source.architecture},
            ) from error
    else:
        raise ONNXExportError(
            f"transformers cannot build {source.architecture} with attention {' or '.join(attention)}: {failure}",
            reason="EXPORT_ENGINE_UNSUPPORTED",
            remedy="use another engine" if "eager" in attention else "use attention eager",
            about={
                "engine": engine,
                "attention": attention[-1],
                "architecture": source.architecture,
                "model_type": source.config.model_type,
            },
        ) from failure
    _fill_with_zero(model)
    _load_buffers(model, source)
    use_every_expert(model)
    compute_biases(model)
    fix_sparsity(model)
    compute_frequencies_in_graph(model)
    return accept_past(model.requires_grad_(False))


@contextmanager
def _put_parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules made in this context on the meta device, and their buffers in memory.

    Buffers (rotary frequencies, masks) become constants of the graph, so they must be real.
    """
    register = torch.nn.Module.register_parameter

    def register_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = torch.nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    # torch has no hook for this; the method is restored before anything else runs.
    setattr(torch.nn.Module, "register_parameter", register_meta)  # noqa: B010  mypy takes no assignment to a method
    try:
        yield
    finally:
        setattr(torch.nn.Module, "register_parameter", register)  # noqa: B010


def _fill_with_zero(model: torch.nn.Module) -> None:
    """Replace meta parameters by views of one number; tied parameters stay tied."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                view = torch.zeros(1).as_strided(parameter.shape, [0] * parameter.dim())
                made[id(parameter)] = torch.nn.Parameter(view, requires_grad=False)
            module._parameters[name] = made[id(parameter)]


def _load_buffers(model: Any, source: ModelSource) -> None:
    """Give buffers the values that the folder has for them: they are constants of a traced graph."""
    stored = dict(model.named_buffers()).keys() & model.state_dict().keys()
    weights = loaded_weights(model, source.weights) if stored else {}
    for name in sorted(stored & weights.keys()):
        owner, _, attribute = name.rpartition(".")
        buffer, value = model.get_buffer(name), weights[name]
        if name in source.stand_ins:
            value = source.value(name)
        if isinstance(value, torch.Tensor) and value.shape == buffer.shape:
            model.get_submodule(owner)._buffers[attribute] = value.to(buffer.dtype)


def tied_weights(model: Any, source: ModelSource) -> dict[str, Weight]:
    """Return the source's weights under every name that the module has for them, and those that its class computes.

    A tied weight is stored once and may appear in a graph under its other name. A table of sinusoids is a weight of some
    classes that is never stored.
    """
    weights = loaded_weights(model, source.weights)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for group in names.values():
        stored = next((name for name in group if name in weights), None)
        if stored is None:
            stored = next((name for name in group if _is_computed(model, name)), None)
            if stored is None:
                continue
            weights[stored] = _compute(model, stored)
        weights.update(dict.fromkeys(group, weights[stored]))
    return weights


def _is_computed(model: Any, name: str) -> bool:
    """Return whether the class of a model says that a weight need not be in its files."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_missing or ())


def _compute(model: Any, name: str) -> torch.Tensor:
    """Return a weight as the model's class initializes it."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    placeholder = module._parameters[attribute]
    module._parameters[attribute] = torch.nn.Parameter(torch.empty(placeholder.shape), requires_grad=False)
    with torch.no_grad():
        model._init_weights(module)
    made = module._parameters[attribute].detach()
    module._parameters[attribute] = placeholder
    return made


def find_misfits(source: ModelSource, *, engine: str) -> list[str]:
    """Find the parameters of transformers' model that the folder lacks under all their names or has in another shape."""
    model = build_weightless(source, engine=engine, attention=("eager",))
    weights = tied_weights(model, source)
    return [
        name
        for name, parameter in model.named_parameters()
        if name not in weights or weights[name].shape != parameter.shape
    ]


def compute_biases(model: Any) -> None:
    """Make MPT and Falcon compute the same bias in a form that can be exported.

    transformers cuts MPT's from the end of a table of ``max_seq_len`` tokens. A trace fixes where the cut begins, and torch.export would
    limit the number of tokens to the table's. It computes Falcon's in bfloat16, for which ONNX Runtime has no kernels on CPUs.
    """
    if model.config.model_type == "falcon" and model.config.alibi:
        _swap_while_running(model.transformer)
    if model.config.model_type == "mpt":
        for module in model.modules():
            if type(module).__name__ == "MptAttention":
                module.register_forward_pre_hook(_exact_bias, with_kwargs=True)


def fix_sparsity(model: Any) -> None:
    """Give Gemma 3n's sparse layers their threshold as a number: ONNX has no inverse of the normal distribution.

    Only activations this many standard deviations above the mean count: as many as are the most active part of a normal distribution.
    """
    for module in model.modules():
        if hasattr(module, "_gaussian_topk") and 0.0 < module.activation_sparsity < 1.0:
            deviations = NormalDist().inv_cdf(module.activation_sparsity)
            module._gaussian_topk = partial(_most_active, deviations)


def _most_active(deviations: float, inputs: torch.Tensor) -> torch.Tensor:
    """Return by how much each activation is above the threshold of its token; 0 for one below. inputs: (…, width)."""
    mean, spread = inputs.mean(-1, keepdim=True), inputs.std(-1, keepdim=True, unbiased=False)
    return torch.relu(inputs - (mean + spread * deviations))


def _exact_bias(_module: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Replace the table by its last places. position_bias: (heads, 1, table), falling by a slope of each head to 0 at the last place."""
    table, keys = named["position_bias"], named["attention_mask"].shape[-1]
    distances = torch.arange(keys, dtype=table.dtype, device=table.device) - (keys - 1)
    return args, {**named, "position_bias": -table[:, :, -2:-1] * distances}  # (heads, 1, keys)


def _swap_while_running(model: Any) -> None:
    """Replace the function that makes Falcon's bias while this model runs: other models of the class keep it."""
    module: Any = sys.modules[type(model).__module__]
    original = module.build_alibi_tensor
    # At the second place, the bias is the slope of its head, already rounded.
    slopes = original(torch.ones(1, 2, dtype=torch.int64), model.num_heads, torch.float32)[:, 0, 1].clone()

    def put(function: Any, *_: Any) -> None:
        module.build_alibi_tensor = function

    model.register_forward_pre_hook(partial(put, partial(_compute_rounded_bias, slopes)))
    model.register_forward_hook(partial(put, original), always_call=True)


def _compute_rounded_bias(
    slopes: torch.Tensor, attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype
) -> torch.Tensor:
    """Compute in float32 what bfloat16 gives. slopes: (heads), attention_mask: (batch, tokens); result (batch * heads, 1, tokens)."""
    batch, tokens = attention_mask.shape
    places = _round_to_bfloat16((((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, :]).to(torch.float32))
    return _round_to_bfloat16(slopes[None, :, None] * places).reshape(batch * num_heads, 1, tokens).to(dtype)


def _round_to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Round to the 8 binary digits of bfloat16 by float32's own rounding (Dekker's splitting)."""
    scaled = values * 65537.0
    return scaled - (scaled - values)


def every_expert(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
    """Compute every token with every expert, and weight the results of experts that were not chosen with zero.

    transformers' own forms loop over the chosen experts, which a trace would fix, or copy the matrices of every token's experts,
    which needs memory for each of them. hidden_states: (tokens, hidden), top_k_index and top_k_weights: (tokens, chosen).
    """
    first, suffix = ("gate_up_proj", "_bias") if self.has_gate else ("up_proj", "_bias")
    tokens = hidden_states[None]

    def project(values: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(self, name)
        values = torch.matmul(values, weight if self.is_transposed else weight.transpose(1, 2))
        return values + getattr(self, name + suffix)[:, None] if self.has_bias else values

    inner = project(tokens, first)  # (experts, tokens, intermediate)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outer = project(inner, "down_proj")  # (experts, tokens, hidden)
    if self.has_post_expert_norm:
        outer = self.post_expert_norm(outer)
    shares = top_k_weights.new_zeros(top_k_weights.shape[0], self.num_experts).scatter(1, top_k_index, top_k_weights)
    return (outer * shares.t()[:, :, None]).sum(dim=0).to(hidden_states.dtype)


def use_every_expert(model: Any) -> None:
    """Make a model's experts run :func:`every_expert`, if it has any that allow it."""
    if model._can_set_experts_implementation():
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # takes longer than building a graph does

        ALL_EXPERTS_FUNCTIONS.register(NAME, every_expert)
        model.set_experts_implementation(NAME)


def try_out(model: torch.nn.Module, run: Callable[[], _T]) -> _T:
    """Return the result of ``run``, which calls a model. Only shapes are computed, if the model's code allows it.

    Code that branches on computed values runs with the placeholders of the weights instead. The engines find out whether the branch matters.
    """
    with torch.no_grad(), _restore_afterwards(model):
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return run()
        except _NEEDS_VALUES:
            pass
    with torch.no_grad(), _restore_afterwards(model):
        return run()


def integer_inputs(*shape: int) -> torch.Tensor:
    """Return token ids, or a mask, of a shape."""
    return torch.ones(shape, dtype=torch.int64)


@contextmanager
def _restore_afterwards(model: torch.nn.Module) -> Iterator[None]:
    """Undo what the block assigns to a model's modules: rotary embeddings keep the angles of the last length.

    Hooks go too. transformers notes at a module that it has hooked its layers to record their results, and would hook them again.
    """
    before = [(module, dict(vars(module)), dict(module._buffers), _hooks_of(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers, hooks in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            for name, kept in hooks.items():
                getattr(module, name).clear()
                getattr(module, name).update(kept)


def _hooks_of(module: torch.nn.Module) -> dict[str, dict[Any, Any]]:
    """Return copies of a module's hooks on its calls, by the attribute that has them."""
    return {
        name: dict(value) for name, value in vars(module).items() if name.startswith("_forward_") and "hooks" in name
    }

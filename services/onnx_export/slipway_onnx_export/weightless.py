"""Build a transformers model that can be traced without weights, with the flat signature that engines trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from slipway.errors import ONNXExportError
from slipway.models.families import DECODER, auto_model
from slipway_onnx_export.source import ModelSource

# Names of the axes that vary. total_sequence is past_sequence + sequence.
BATCH, SEQUENCE, PAST, TOTAL = "batch", "sequence", "past_sequence", "total_sequence"

# Sizes of the traced example, all different and above 1, so that a tracer does not confuse axes or fix one as a constant.
TRACE_BATCH, TRACE_SEQUENCE, TRACE_PAST = 2, 3, 5


class FlatDecoder(torch.nn.Module):
    """A causal language model whose inputs and outputs are plain tensors.

    forward takes input_ids (batch, sequence), attention_mask (batch, past + sequence), position_ids (batch, sequence) and
    the cache as key, value, key, value … each (batch, kv heads, past, head size); it returns logits (batch, sequence,
    vocabulary) and the extended cache in the same order.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Run the model; see the class."""
        cache = transformers.DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        present = [tensor for layer in out.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return (out.logits, *present)


def build_weightless_decoder(source: ModelSource, *, engine: str, attention: tuple[str, ...]) -> FlatDecoder:
    """Build the source's architecture with real buffers, and weights that are views of a single zero.

    Args:
        source: The model's folder; its weights are not read.
        engine: Name for the error's ``about``.
        attention: transformers' attention implementations; the first that the architecture supports is used.

    Raises:
        ONNXExportError: ``EXPORT_ENGINE_UNSUPPORTED`` if transformers has no causal language model for it.
    """
    for implementation in attention:
        try:
            with _parameters_on_meta():
                model = (
                    auto_model(DECODER)
                    .from_config(
                        source.config, dtype=torch.float32, attn_implementation=implementation, trust_remote_code=False
                    )
                    .eval()
                )
            break
        except (ValueError, TypeError, ImportError) as error:
            failure = error
    else:
        raise ONNXExportError(
            f"transformers cannot build {source.architecture}: {failure}",
            reason="EXPORT_ENGINE_UNSUPPORTED",
            remedy="use another engine",
            about={"engine": engine, "architecture": source.architecture, "model_type": source.config.model_type},
        ) from failure
    _fill_with_zero(model)
    model.requires_grad_(False)
    return FlatDecoder(model)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
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


def trace_inputs(decoder: FlatDecoder) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return example inputs with a past and left padding, so that the trace depends on neither."""
    config = decoder.model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    mask = torch.ones(TRACE_BATCH, TRACE_PAST + TRACE_SEQUENCE, dtype=torch.int64)
    mask[0, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, TRACE_PAST:]
    ids = torch.zeros(TRACE_BATCH, TRACE_SEQUENCE, dtype=torch.int64)
    past = [torch.zeros(TRACE_BATCH, heads, TRACE_PAST, size) for _ in range(2 * config.num_hidden_layers)]
    return ids, mask, positions, past


def interface_names(layers: int) -> tuple[list[str], list[str]]:
    """Return the names of the inputs and outputs of :class:`FlatDecoder`, in its order."""
    pairs = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    inputs = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{pair}" for pair in pairs)]
    return inputs, ["logits", *(f"present.{pair}" for pair in pairs)]


def tied_weights(decoder: FlatDecoder, source: ModelSource) -> dict[str, torch.Tensor]:
    """Return the source's weights under every name that the module has for them.

    A tied weight is stored once and may appear in a graph under its other name.
    """
    weights = dict(source.weights)
    names: dict[int, list[str]] = {}
    for name, parameter in decoder.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for group in names.values():
        stored = next((name for name in group if name in weights), None)
        if stored is not None:
            weights.update(dict.fromkeys(group, weights[stored]))
    return weights


def find_misfits(source: ModelSource, *, engine: str) -> list[str]:
    """Find the parameters of transformers' model that the folder lacks under all their names or has in another shape."""
    decoder = build_weightless_decoder(source, engine=engine, attention=("eager",))
    weights = tied_weights(decoder, source)
    return [
        name
        for name, parameter in decoder.model.named_parameters()
        if name not in weights or weights[name].shape != parameter.shape
    ]

"""Trace the recurrences of linear attention as one operator, ONNX Runtime's ``LinearAttention``.

transformers computes them in chunks of a text, by loops whose turns a trace would fix. The operator takes any number of tokens after
any state, and is the same recurrence (its documentation in ONNX Runtime 1.31):

- gated, which is Mamba 2 (arXiv 2405.21060): S' = exp(g) S + k vᵀ
- gated delta (arXiv 2412.06464): S' = exp(g) S + β k (v - exp(g) Sᵀ k)ᵀ

Each token's result is S'ᵀ q. Axes: B = batch, T = tokens, H = heads, K and V = sizes of a head's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from slipway.errors import ONNXExportError
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.source import ModelSource

DOMAIN, OPERATOR = "com.microsoft", "LinearAttention"
ENGINE = "dynamo"
"""The engine that traces the operator."""
_EPSILON = 1e-6
"""What transformers adds to the squared length of a query or key before the root."""


def check_form(source: ModelSource, params: OnnxExportParams, *, engine: str) -> None:
    """Check that a model whose layers keep states can have a graph of this form; any other model can.

    Raises:
        ONNXExportError: ``FAMILY_UNSUPPORTED``, ``SHAPES_UNSUPPORTED`` or ``EXPORT_ENGINE_UNSUPPORTED``.
    """
    if not source.keeps_states:
        return
    about = {"architecture": source.architecture, "model_type": source.config.model_type}
    what = f"{source.architecture} has layers that keep a state"
    if params.runtime != "onnxruntime":
        raise ONNXExportError(
            f"{what}, which ONNX Runtime's operator {OPERATOR} computes, and {params.runtime} does not have it",
            reason="FAMILY_UNSUPPORTED",
            remedy="leave this format out for this model",
            about=about,
        )
    if params.shapes == "static" and params.cache:
        raise ONNXExportError(
            f"{what}, and the unused places of a static cache would change it",
            reason="SHAPES_UNSUPPORTED",
            remedy="set shapes to dynamic or batch",
            about=about,
        )
    if engine != ENGINE or params.layered:
        form = "graphs in layers" if params.layered else f"engine {engine}"
        raise ONNXExportError(
            f"{what}, and {form} cannot have them",
            reason="EXPORT_ENGINE_UNSUPPORTED",
            remedy=f"use engine {ENGINE} with opset 18 or later, and whole graphs",
            about={**about, "engine": engine},
        )


def _gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gated delta rule; names and order are those of transformers' ``torch_chunk_gated_delta_rule``.

    query, key: (B, T, heads of keys, K), value: (B, T, H, V), g and beta: (B, T, H), initial_state: (B, H, K, V).
    """
    heads, size = value.shape[2], query.shape[3]
    if use_qk_l2norm_in_kernel:
        query, key = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + _EPSILON) for each in (query, key))
    query, key = (_repeat_heads(each, heads) for each in (query, key))
    return _linear_attention(query, key, value, initial_state, decay=g, beta=beta, rule="gated_delta", scale=size**-0.5)


def _selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - transformers' name
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    *,
    D: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Compute Mamba 2's scan; names and order are those of transformers' ``mamba2_chunk_scan``.

    hidden_states: (B, T, H, V), dt: (B, T, H), A and D: (H,), B and C: (B, T, groups, K), initial_states: (B, H, V, K).
    """
    heads = hidden_states.shape[2]
    step = dt if dt_bias is None else dt + dt_bias
    step = functional.softplus(step) if dt_softplus else step
    if dt_limit != (0.0, float("inf")):
        step = step.clamp(*dt_limit)
    state = None if initial_states is None else initial_states.transpose(2, 3)
    results, state = _linear_attention(
        _repeat_heads(C, heads),
        _repeat_heads(B, heads),
        hidden_states * step[..., None],
        state,
        decay=A * step,
        beta=None,
        rule="gated",
        scale=1.0,
    )
    if D is not None:
        results = results + hidden_states * D[:, None]
    return (results, state.transpose(2, 3)) if return_final_states else results


RECURRENCES: Mapping[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "mamba2_chunk_scan": _selective_scan,
}
"""By the name of the function of transformers that each replaces."""


def _linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor | None,
    *,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    rule: str,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operator's results, (B, T, H, V), and the new state, (B, H, K, V), in float32.

    query, key: (B, T, H, K), value: (B, T, H, V), state: (B, H, K, V), decay and beta: (B, T, H).
    """
    batch, tokens, heads, size = value.shape
    packed = [each.float().flatten(2) for each in (query, key, value)]
    kept = (batch, heads, key.shape[3], size)
    inputs = [*packed, state, decay.float(), *([] if beta is None else [beta.float()])]
    results, new = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{OPERATOR}",
        inputs,
        {"update_rule": rule, "scale": scale, "q_num_heads": heads, "kv_num_heads": heads},
        dtypes=(torch.float32, torch.float32),
        shapes=((batch, tokens, heads * size), kept),
        version=1,
    )
    return results.unflatten(2, (heads, size)), new


def _repeat_heads(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Give neighbouring heads the values of the head or group that they share. (B, T, groups, K) → (B, T, H, K)."""
    return values.repeat_interleave(heads // values.shape[2], dim=2, output_size=heads)

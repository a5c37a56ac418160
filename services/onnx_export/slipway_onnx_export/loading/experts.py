"""Trace mixtures of experts: a form of transformers' experts that does not depend on which experts the tokens choose."""

from __future__ import annotations

from typing import Any

import torch

NAME = "every_expert"


def every_expert(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
    """Let every expert compute every token, and weight what it was not chosen for with zero.

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
    """Let a model's experts run in the form of :func:`every_expert`, if it has any that allow it."""
    if model._can_set_experts_implementation():
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # takes longer than building a graph does

        ALL_EXPERTS_FUNCTIONS.register(NAME, every_expert)
        model.set_experts_implementation(NAME)

"""The constants that a traced program implies, by the name that its translation gives them."""

from __future__ import annotations

from typing import Any

import torch

_LARGEST = 1 << 16
"""Largest value that is computed from others here; what is computed from weights alone is a norm's or a table's."""

_CHECKS = (torch.ops.aten._assert_tensor_metadata.default,)
"""Operations without a result."""


class TracedConstants:
    """Weights of a trace, and what its operations compute from weights alone.

    Attributes:
        weights: Values of the weights that the trace uses, by name of its input; single numbers, which a converter folds, are left out.
        computed: Values of operations on weights alone, by name.
    """

    def __init__(self, traced: Any) -> None:
        signature = traced.graph_signature
        stored = {**traced.state_dict, **traced.constants}
        changed = set(signature.buffers_to_mutate.values())
        named = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        nodes = {node.name: node for node in traced.graph.nodes}
        self._nodes = nodes
        self.weights = {
            name: stored[source].detach()
            for name, source in named.items()
            if source not in changed
            and _users(nodes[name])
            and stored[source].is_floating_point()
            and stored[source].numel() > 1
        }
        self.computed: dict[str, torch.Tensor] = {}
        known: dict[Any, torch.Tensor] = {nodes[name]: value for name, value in self.weights.items()}
        for node in traced.graph.nodes:
            if node.op != "call_function" or not node.all_input_nodes:
                continue
            if all(each in known and known[each].numel() <= _LARGEST for each in node.all_input_nodes):
                found = node.target(*_filled(node.args, known), **_filled(node.kwargs, known))
                if isinstance(found, torch.Tensor):
                    self.computed[node.name] = known[node] = found

    def users(self, name: str) -> list[str]:
        """Return the names of the operations that take a value."""
        return _users(self._nodes[name])


def _users(node: torch.fx.Node) -> list[str]:
    return [user.name for user in node.users if user.target not in _CHECKS]


def _filled(given: Any, known: dict[Any, torch.Tensor]) -> Any:
    return torch.fx.node.map_arg(given, lambda node: known[node])

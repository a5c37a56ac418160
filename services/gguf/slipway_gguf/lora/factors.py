"""Plan the tensors of an adapter's file: the factors of each weight, with rows in the base's order and one alpha for all.

llama.cpp adds ``alpha / r · B @ (A @ x)`` to a product with a weight, where ``r`` is the number of columns of B, and the file has one
``alpha`` for all weights (``llama-adapter.cpp``, ``llama_adapter_lora_weight::get_scale``). For an embedding it looks up rows of A
instead (``llm_graph_context::build_inp_embd``).

Axes: r = rank of a pair, d_in and d_out = columns and rows of the weight in the file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import gguf
import numpy as np

from slipway.errors import AdapterExportError
from slipway.model.adapters.pairs import Pair
from slipway.texts import quoted
from slipway_gguf.parameters import Parameters
from slipway_gguf.weights.tensors import EMBEDDING, Part, Planned, keep, names_of, transpose

_SAME = 2.0**-23
"""Relative distance of numbers that are equal in float32, the type of ``adapter.lora.alpha``."""
_REMEDY = "use the base model that the adapter was trained on"


@dataclass(frozen=True, slots=True)
class Factors:
    """The tensors of a file.

    Attributes:
        tensors: The tensors, A before B.
        alpha: Alpha of all pairs.
        folded: Number of pairs with another alpha, which is multiplied into their B.
    """

    tensors: list[Planned]
    alpha: float
    folded: int


def plan_factors(pairs: Sequence[Pair], base: Sequence[Planned], parameters: Parameters) -> Factors:
    """Plan the tensors of an adapter, in the order of the base's.

    Args:
        pairs: The adapter's pairs, with the base's names of their modules.
        base: Tensors of the base's file.
        parameters: The base's numbers.

    Raises:
        AdapterExportError: ``ADAPTER_TENSOR_UNUSED`` for a module without a weight in the file, or two for one;
            ``ADAPTER_BASE_MISMATCH`` for another shape; ``ADAPTER_NOT_SERVABLE`` if all scalings are zero.
    """
    names, planned = names_of(parameters), {each.name: each for each in base}
    alpha = common_alpha(pairs)
    matches: dict[str, tuple[Pair, float]] = {}
    for pair in pairs:
        name = names.get_name(f"{pair.module}.weight", try_suffixes=(".weight",))
        if name not in planned or name in matches:
            what = "belongs to the same weight as another" if name in planned else "has no weight in the base's file"
            raise _pair_error(f"the adapter's module {quoted(pair.module)} {what}", pair, "ADAPTER_TENSOR_UNUSED")
        _check_shape(pair, planned[name])
        matches[name] = (pair, _factor(pair, alpha))
    ordered = [(each, *matches[each.name]) for each in base if each.name in matches]
    tensors = [half for each, pair, factor in ordered for half in _halves(each, pair, factor)]
    return Factors(tensors, alpha, sum(factor != 1.0 for _, _, factor in ordered))


def common_alpha(pairs: Iterable[Pair]) -> float:
    """Return the most common alpha of the pairs, rounded to float32, so that the fewest factors change.

    Raises:
        AdapterExportError: ``ADAPTER_NOT_SERVABLE``: all scalings are zero, for which llama.cpp would take 1, or beyond float32.
    """
    with np.errstate(over="ignore"):
        each = [float(np.float32(pair.scaling * pair.rank)) for pair in pairs]
    alphas = Counter(alpha for alpha in each if alpha and math.isfinite(alpha))
    if not alphas:
        raise AdapterExportError(
            "the adapter cannot be served beside its base: all its scalings are zero, or beyond float32",
            remedy="check lora_alpha in adapter_config.json; with zero the base model alone computes the same",
            about={"rule": "nothing"},
        )
    most = max(alphas.values())
    return max(alpha for alpha, count in alphas.items() if count == most)


def kind_of(planned: Planned) -> gguf.GGMLQuantizationType:
    """Return the type of a factor: float16 if it is stored so and multiplied by nothing, otherwise float32, which rounds nothing."""
    exact = planned.factor == 1.0 and all(part.tensor.dtype == "F16" for part in planned.parts)
    return gguf.GGMLQuantizationType.F16 if exact else gguf.GGMLQuantizationType.F32


def _factor(pair: Pair, alpha: float) -> float:
    """Return the factor to multiply B by, so that ``alpha / r`` gives the pair's scaling."""
    factor = pair.scaling * pair.rank / alpha
    return 1.0 if abs(factor - 1.0) <= _SAME else factor


def _halves(weight: Planned, pair: Pair, factor: float) -> tuple[Planned, Planned]:
    """Return A (r, d_in) and B (d_out, r) for a weight; A (vocabulary, r) and B (features, r) for an embedding.

    The rows of B have the order of the weight's rows. A weight that the model stores as (in, out) has factors like any other.
    """
    [part] = weight.parts
    across = weight.name == EMBEDDING
    order = keep if across or part.view is transpose else part.view
    a_shape = pair.a.shape[::-1] if across else pair.a.shape
    a = Planned(f"{weight.name}.lora_a", a_shape, (Part(pair.a, transpose if across else keep),))
    return a, Planned(f"{weight.name}.lora_b", pair.b.shape, (Part(pair.b, order),), factor=factor)


def _check_shape(pair: Pair, planned: Planned) -> None:
    left, right = pair.b.shape[0], pair.a.shape[1]
    updated = (right, left) if pair.embedding else (left, right)
    if updated != planned.shape or pair.embedding is not (planned.name == EMBEDDING):
        kind = "an embedding" if pair.embedding else "a weight"
        raise _pair_error(
            f"the adapter's pair for {quoted(pair.module)} updates {kind} of shape {updated}, and the file's "
            f"{planned.name} has {planned.shape}",
            pair,
            "ADAPTER_BASE_MISMATCH",
        )


def _pair_error(what: str, pair: Pair, reason: str) -> AdapterExportError:
    return AdapterExportError(what, reason=reason, remedy=_REMEDY, about={"module": pair.module[:200]})

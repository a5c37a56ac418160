"""Let the reference's model compute with other weights: those that an output stores, or its own merged ones rounded to a level.

Axes: N output features, K input features, R some of the N.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slipway.model.pytorch.block_weights import MADE
from slipway.model.pytorch.wide_layers import WideEmbedding
from slipway.proof.stored_weights import Names, NotUnderstoodError, StoredModel, StoredWeight
from slipway_validate.runner.yardsticks.encoders import is_for_images
from slipway_validate.runner.yardsticks.roundings import Rounding

_WRAPPERS = re.compile(r"\.(?:base_layer|modules_to_save|original_module)(?:\.default)?(?=\.|$)")
_PREFIX = re.compile(r"^base_model\.model\.")
_FACTORS = re.compile(r"\.lora_[A-Za-z_]+\.")
_PIECE_VALUES = 1 << 22
"""Values of a weight that are read at a time."""
_FUSED = 3
"""Axes of a weight that holds several experts."""
_SMALL = 1 << 16
_PLAIN_TABLES = (nn.Embedding, WideEmbedding)

Rows = Callable[[slice], Tensor]
"""Reads rows of a weight, float32 (R, K)."""


def _as_it_is(values: Tensor) -> Tensor:
    return values


class Products:
    """The layers of a model whose weights are products or lookups, by the names that the model gives their weights.

    Args:
        model: The model.
        unused: Beginnings of the names of layers that no result depends on, so that an output need not store them.

    Raises:
        NotUnderstoodError: The model has weights of another kind, such as fused experts.
    """

    def __init__(self, model: nn.Module, unused: tuple[str, ...] = ()) -> None:
        self._model = model
        self.layers: dict[str, Any] = {}
        within: set[int] = set()
        for path, layer in model.named_modules():
            if isinstance(layer, nn.Linear | nn.Embedding | Conv1D) and not _FACTORS.search(f"{path}."):
                name = f"{_WRAPPERS.sub('', _PREFIX.sub('', path))}.weight"
                if not name.startswith(unused):
                    self.layers.setdefault(name, layer)
                within |= {id(each) for each in layer.parameters(recurse=False)}
        for path, value in model.named_parameters():
            alone = id(value) not in within and ".conv" not in path and not is_for_images(path)
            if alone and value.dim() >= _FUSED and value.numel() > _SMALL:
                raise NotUnderstoodError(f"{path} holds several matrices of {tuple(value.shape)}")
        self._tied = _tied_names(self.layers)

    def rows_of(self, name: str) -> int:
        """Return N of a weight by its name; 0 if there is none."""
        layer = self.layers.get(name)
        return _shape(layer)[0] if layer is not None else 0

    @contextmanager
    def use_stored(self, model: StoredModel, *, encoder: Rounding = _as_it_is) -> Iterator[None]:
        """Compute with the weights that an output stores.

        Args:
            model: What it stores.
            encoder: Rounds the merged weights of parts for images and sound of which the output stores nothing that is read.

        Raises:
            NotUnderstoodError: One of the others is not there, or in an unknown form.
        """
        names, updates = Names(model.names), _updates_of(self._model)
        weights: dict[str, Rows] = {}
        for name, layer in self.layers.items():
            key = names.find(name) or next(filter(None, map(names.find, self._tied.get(name, ()))), None)
            if is_for_images(name) and (key is None or not is_for_images(key)):
                weights[name] = _merge(layer, updates.get(name), encoder)
                continue
            if key is None:
                raise NotUnderstoodError(f"it has no weight {name}")
            weight = model.weight(key, turned=isinstance(layer, Conv1D))
            if tuple(weight.shape) != _shape(layer):
                raise NotUnderstoodError(f"{name} has the shape {tuple(weight.shape)} instead of {_shape(layer)}")
            weights[name] = _reader(weight)
        with self._replace_weights(weights):
            yield

    @contextmanager
    def use_rounded(
        self, model: nn.Module, rounding: Rounding, others: Rounding, *, encoder: Rounding | None = None
    ) -> Iterator[None]:
        """Compute with the merged weights rounded to the nearest.

        Those of products are rounded by ``rounding``, those of embedding and head by ``others``, and those of parts for images and sound by
        ``encoder`` if it is given.
        """
        updates = _updates_of(model)
        # An encoder has no head that makes tokens, and most layers have no adapter: None is left out.
        ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
        outer = {id(each) for each in ends if each is not None}
        weights = {}
        for name, layer in self.layers.items():
            chosen = others if _is_outer(layer, outer, updates.get(name)) else rounding
            chosen = encoder if encoder is not None and is_for_images(name) else chosen
            weights[name] = _merge(layer, updates.get(name), chosen)
        with self._replace_weights(weights):
            yield

    @contextmanager
    def round_inputs(self, rounding: Rounding, *, encoder: Rounding | None = None) -> Iterator[None]:
        """Round the inputs of each product; those of parts for images and sound by ``encoder`` if it is given."""

        def hook(own: Rounding) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
            return lambda _, given: (own(given[0]), *given[1:])

        hooks = [
            layer.register_forward_pre_hook(hook(encoder if encoder and is_for_images(name) else rounding))
            for name, layer in self.layers.items()
            if not isinstance(layer, nn.Embedding)
        ]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    def check_encoder(self) -> None:
        """Check that the merged weights of parts for images and sound are known: an adapter may also change convolutions.

        Raises:
            NotUnderstoodError: It does.
        """
        others = sorted(name for name in _updates_of(self._model) if is_for_images(name) and name not in self.layers)
        if others:
            raise NotUnderstoodError(f"{others[0]} is no product")

    @contextmanager
    def _replace_weights(self, weights: dict[str, Rows]) -> Iterator[None]:
        tables = {name: layer for name, layer in self.layers.items() if _looks_up_otherwise(layer)}
        others = {name: layer for name, layer in self.layers.items() if name not in tables}
        kept = {name: layer.__dict__.get("forward") for name, layer in others.items()}
        own = {name: layer.weight for name, layer in tables.items()}
        try:
            for name, layer in others.items():
                layer.__dict__["forward"] = _make_forward(layer, weights[name])
            for name, layer in tables.items():
                layer.weight = nn.Parameter(weights[name](slice(None)), requires_grad=False)
            yield
        finally:
            for layer in self.layers.values():
                layer.__dict__.pop(MADE, None)
            for name, layer in tables.items():
                layer.weight = own[name]
            for name, layer in others.items():
                layer.__dict__.pop("forward", None)
                if kept[name] is not None:
                    layer.__dict__["forward"] = kept[name]


def _updates_of(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the layers with an adapter, by the names of their weights."""
    return {
        f"{_WRAPPERS.sub('', _PREFIX.sub('', path))}.weight": each
        for path, each in model.named_modules()
        if isinstance(each, LoraLayer)
    }


def _reader(weight: StoredWeight) -> Rows:
    return lambda rows: weight.take(rows).values


def _is_outer(layer: Any, outer: set[int], wrapper: Any) -> bool:
    return id(layer) in outer or id(wrapper) in outer or isinstance(layer, nn.Embedding)


def _looks_up_otherwise(layer: Any) -> bool:
    """Return whether a table takes something else than numbers of rows: tables of positions take the tokens' shape, and how many came before.

    Such a table keeps its code, and its weight is replaced, because it is small. A table that only scales its rows is not one of them.
    """
    return isinstance(layer, nn.Embedding) and type(layer) not in _PLAIN_TABLES and not hasattr(layer, "embed_scale")


def _shape(layer: Any) -> tuple[int, int]:
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    columns, rows = layer.weight.shape
    return rows, columns


def _tied_names(layers: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return for each weight the names of those that are the same tensor."""
    alike: dict[int, list[str]] = {}
    for name, layer in layers.items():
        alike.setdefault(_own_weight(layer).data_ptr(), []).append(name)
    return {name: tuple(other for other in names if other != name) for names in alike.values() for name in names}


def _own_weight(layer: Any) -> Tensor:
    """Return a layer's weight as it is kept, (N, K) but for a Conv1D."""
    stored = layer.__dict__.get("stored")
    weight: Tensor = stored if stored is not None else layer.weight
    return weight


def _merge(layer: Any, adapted: Any, rounding: Rounding) -> Rows:
    """Compute W + Δ, rounded, once for all calls of a pass; the layer keeps it as long as its block is in memory."""

    def rows(wanted: slice) -> Tensor:
        if MADE not in layer.__dict__:
            layer.__dict__[MADE] = rounding(_merged(layer, adapted))
        values: Tensor = layer.__dict__[MADE]
        return values[wanted]

    return rows


def _merged(layer: Any, adapted: Any) -> Tensor:
    """Return W + Δ, (N, K)."""
    weight = _own_weight(layer).detach().float()
    weight = weight.T if isinstance(layer, Conv1D) else weight
    if adapted is None:
        return weight
    for name in adapted.active_adapters:
        if name in adapted.lora_A or name in getattr(adapted, "lora_embedding_A", {}):
            update = adapted.get_delta_weight(name).detach().float()
            weight = weight + (update.T if isinstance(layer, Conv1D) else update)
    return weight


def _make_forward(layer: Any, rows: Rows) -> Callable[[Tensor], Tensor]:
    count, columns = _shape(layer)
    step = max(1, _PIECE_VALUES // columns)

    @torch.no_grad()
    def product(given: Tensor) -> Tensor:
        flat = given.reshape(-1, columns).float()
        result = torch.cat([flat @ rows(slice(at, min(at + step, count))).T for at in range(0, count, step)], dim=1)
        if layer.bias is not None:
            result = result + layer.bias.float()
        return result.view(*given.shape[:-1], count)

    @torch.no_grad()
    def lookup(given: Tensor) -> Tensor:
        ids = given.reshape(-1)
        vectors = torch.empty(len(ids), columns)
        for at in range(0, count, step):
            inside = (ids >= at) & (ids < at + step)
            if bool(inside.any()):
                vectors[inside] = rows(slice(at, min(at + step, count)))[ids[inside] - at]
        vectors = vectors.view(*given.shape, columns)
        scale = getattr(layer, "embed_scale", None)  # some of transformers' own embeddings multiply what they look up
        return vectors if scale is None else vectors * scale

    return lookup if isinstance(layer, nn.Embedding) else product

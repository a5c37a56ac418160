"""A transformers model whose large weights stay in their files: its memory does not grow with its depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from slipway.errors import QuantizationError
from slipway.model.configuration import NO_FIRST_TOKEN, ModelConfig, first_token
from slipway.model.families import ENCODER_DECODER, SEQUENCE_CLASSIFIER, Comparison, Family, auto_model
from slipway.model.folder import ModelFolder
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights.reading import Weights, open_weights, row_pieces
from slipway_quantize.calibration.streaming.experts import put_experts
from slipway_quantize.calibration.streaming.layers import Layer, Rounding, Table, walk
from slipway_quantize.calibration.windows import Batch
from slipway_quantize.experts import mixture_of
from slipway_quantize.layers.model_code import find_linear_layers, model_config
from slipway_quantize.layers.structure import LinearWeight, require_family
from slipway_quantize.model_weights import map_tensor, read_rows, read_tensors, require_finite
from slipway_quantize.sensitive import sensitive_reason
from slipway_quantize.split_experts import SplitExperts


class StreamedModel:
    """A model that computes in float32 with weights that are mapped from their files.

    Args:
        folder: The model.
        group_size: Weights per scale; layers whose input width is not a multiple of it are not rounded.
        head: Whether a decoder's lm_head is rounded too.
        finite: Whether its weights are known to be finite, as those of a model that is loaded again are.
        sensitive: Whether layers are rounded that keep their type by default.

    Attributes:
        family: Its family.
        layers: Layers to round, by the name of their weight, in the model's order, experts last.
        experts: Names of those that are matrices of experts.
        dtype: Type of its weights.
        vocabulary: Number of tokens that it knows.
        tied: Name of the embedding's weight, if the head shares it and is rounded; otherwise empty.
        start: An encoder-decoder's first decoder token and the size of its decoder's vocabulary; None for other models.
        encoder_blocks: Modules of an encoder-decoder's encoder; empty for other models.

    Raises:
        QuantizationError: ``CALIBRATION_UNSUPPORTED`` and the reasons of reading a model.
    """

    def __init__(
        self, folder: ModelFolder, *, group_size: int, head: bool, finite: bool = False, sensitive: bool = True
    ) -> None:
        self.family = require_family(folder.config)
        config = model_config(folder)
        _require_supported(self.family, config)
        with closing(open_weights(folder.path, {})) as stored:
            weights, stacks = _split_experts(folder.config, stored, config.model_type)
            tensors = read_tensors(weights)
            for info in tensors.values() if not finite else ():
                for first, count in row_pieces(info):
                    require_finite(read_rows(weights, info, first, count), info.name)
        structure = find_linear_layers(config, self.family, tensors, stacks=stacks)
        self.renamed = structure.renamed
        tensors |= {name: tensors[stored_name] for name, stored_name in structure.renamed.items()}
        self.model = _build(config, self.family)
        self._ties: dict[str, str] = getattr(self.model, "all_tied_weights_keys", None) or {}
        self.layers: dict[str, Layer] = {}
        self._others: list[Layer] = []
        rounded = {
            f"{weight.module}.weight": weight.source
            for weight in structure.linear
            if tensors[weight.source].shape[1] % group_size == 0
            and (head or not self._is_head(weight.module))
            and (sensitive or not sensitive_reason(weight.module))
        }
        self._put_layers(tensors, rounded)
        self.experts = self._put_experts(structure.experts, tensors, group_size)
        self.tied = ""
        self._tables = self._put_tables(tensors, rounded)
        self._put_others(tensors)
        self.dtype = map_tensor(tensors[next(iter(rounded.values()))]).dtype if rounded else torch.float32
        self.vocabulary = int(self.model.get_input_embeddings().num_embeddings)
        self.start = _start(folder, config) if self.family is ENCODER_DECODER else None
        self.encoder_blocks = frozenset(self.model.get_encoder().modules()) if self.start else frozenset()

    def _is_head(self, module: str) -> bool:
        return self.model.get_output_embeddings() is self.model.get_submodule(module)

    def _put_layers(self, tensors: Mapping[str, TensorInfo], rounded: Mapping[str, str]) -> None:
        for module_name, module in walk(self.model, torch.nn.Linear):
            name = f"{module_name}.weight"
            info = tensors.get(name) or tensors.get(self._ties.get(name, ""))
            if info is None:
                continue
            layer = Layer(name, module, map_tensor(info))
            self._replace(module, layer.stored)
            if name in rounded:
                self.layers[name] = layer
            else:
                self._others.append(layer)

    def _put_experts(
        self, experts: Sequence[LinearWeight], tensors: Mapping[str, TensorInfo], group_size: int
    ) -> frozenset[str]:
        try:
            made = put_experts(self.model, experts, tensors) if experts else {}
        except ValueError as error:
            raise unsupported_error(str(error), self.model.config.model_type) from error
        rounded = {name: layer for name, layer in made.items() if layer.stored.shape[1] % group_size == 0}
        self.layers |= rounded
        return frozenset(rounded)

    def _put_tables(self, tensors: Mapping[str, TensorInfo], rounded: Mapping[str, str]) -> list[Table]:
        tables = []
        shared = {source: name for name, source in rounded.items() if source != name}
        for module_name, module in walk(self.model, torch.nn.Embedding):
            name = f"{module_name}.weight"
            info = tensors.get(name) or tensors.get(self._ties.get(name, ""))
            if info is None:
                continue
            if _looks_up_positions(module, self.model):
                continue
            stored = map_tensor(info)
            layer = self.layers.get(shared.get(info.name, ""))
            if layer is not None:
                self.tied = name
            tables.append(Table(module, stored, layer))
            self._replace(module, stored)
        return tables

    def _replace(self, module: Any, stored: Tensor) -> None:
        module._parameters["weight"] = torch.nn.Parameter(stored, requires_grad=False)

    def _put_others(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Load small tensors (norms, biases, tables of positions) in float32."""
        for path, module in self.model.named_modules():
            done = isinstance(module, torch.nn.Linear | torch.nn.Embedding) and not _looks_up_positions(
                module, self.model
            )
            for kind in (module._parameters, module._buffers):
                for attribute, value in list(kind.items()):
                    name = f"{path}.{attribute}".lstrip(".")
                    if (
                        value is None
                        or not value.numel()
                        or (done and attribute == "weight" and self._has(name, tensors))
                    ):
                        continue
                    if self._has(name, tensors):
                        loaded = map_tensor(tensors.get(name) or tensors[self._ties[name]])
                        loaded = loaded.float() if loaded.is_floating_point() else loaded.clone()
                        kind[attribute] = (
                            torch.nn.Parameter(loaded, requires_grad=False) if kind is module._parameters else loaded
                        )
                    elif hasattr(module, "create_weight"):  # sines and cosines of positions
                        kind[attribute] = torch.nn.Parameter(module.create_weight(), requires_grad=False)
                    elif kind is module._parameters:
                        self._require_unused(name)
                        value.data.zero_()

    def _has(self, name: str, tensors: Mapping[str, TensorInfo]) -> bool:
        return name in tensors or self._ties.get(name) in tensors

    def _require_unused(self, name: str) -> None:
        if not name.startswith(self.family.unused or ("\0",)):
            raise unsupported_error(
                f"no file has the weight {name!r}, which transformers computes or makes at random",
                self.model.config.model_type,
            )

    @property
    def tied_layers(self) -> frozenset[str]:
        """Names of the rounded weights that are embeddings too."""
        return frozenset(table.layer.name for table in self._tables if table.layer is not None)

    def save_memory(self, *, on: bool = True) -> None:
        """Keep only the inputs of each block for the gradients and recompute its inside, or stop doing so."""
        for _, block in walk(self.model, GradientCheckpointingLayer):
            block.gradient_checkpointing = on
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            block.training = on  # only the block itself: its modules must not drop anything

    @contextmanager
    def record_rows(self, rows: list[Tensor]) -> Iterator[None]:
        """Append the rows of an embedding shared with the head that are looked up within the block; they take gradients."""
        shared = [table for table in self._tables if table.layer is not None]
        for table in shared:
            table.rows = rows
        try:
            yield
        finally:
            for table in shared:
                table.rows = None

    @contextmanager
    def use_rounded(self, weights: Mapping[str, Rounding]) -> Iterator[None]:
        """Compute with rounded weights within the block."""
        for name, layer in self.layers.items():
            layer.rounding = weights.get(name)
        for table in self._tables:
            table.rounded = True
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.rounding = None
            for table in self._tables:
                table.rounded = False

    @property
    def tunes_hidden_states(self) -> bool:
        """Whether weights are tuned by the hidden states of all tokens: a text's few classes say too little about each weight."""
        return self.family is SEQUENCE_CLASSIFIER

    def tuning_results(self, batch: Batch) -> Tensor:
        """Return the results that weights are tuned by: the compared ones, or the last hidden states. (positions, values)."""
        if not self.tunes_hidden_states:
            return self.outputs(batch)
        states: list[Tensor] = []
        hook = self.model.base_model.register_forward_hook(lambda _module, _inputs, given: states.append(given[0]))
        try:
            self._run(batch)
        finally:
            hook.remove()
        return states[0][batch.mask == 1]

    def _run(self, batch: Batch) -> Any:
        inputs = {"input_ids": batch.tokens}
        if self.family is SEQUENCE_CLASSIFIER or not bool(batch.mask.all()):
            inputs["attention_mask"] = batch.mask
        if batch.decoder is not None:
            inputs["decoder_input_ids"] = batch.decoder
        return self.model(**inputs)

    def outputs(self, batch: Batch) -> Tensor:
        """Return the results of a batch that are compared, by position: logits or hidden states. (positions, values)."""
        given, whole = self._run(batch), bool(batch.mask.all())
        parts = [given[name] for name in self.family.outputs]
        match self.family.comparison:
            case Comparison.SPANS:
                hidden = batch.mask == 0
                return torch.cat([part.masked_fill(hidden, -1e4) for part in parts])
            case Comparison.CLASSES if parts[0].dim() == 2:
                return parts[0]
        return parts[0].flatten(0, 1) if whole else parts[0][batch.result_mask == 1]


def _looks_up_positions(module: Any, model: Any) -> bool:
    """Return whether an embedding makes its own indices; one that only scales its rows has as many as there are tokens."""
    if not isinstance(module, torch.nn.Embedding) or type(module).forward is torch.nn.Embedding.forward:
        return False
    return bool(module.num_embeddings != model.get_input_embeddings().num_embeddings)


def _require_supported(family: Family, config: Any) -> None:
    if family.takes_sound:
        raise unsupported_error(
            f"a model of family {family.name} is not calibrated: its inputs are sound", config.model_type
        )


def _split_experts(known: ModelConfig, weights: Weights, kind: str) -> tuple[Weights, Mapping[str, TensorInfo]]:
    """Return weights in which each matrix of an expert is a tensor, and the stacks that they were."""
    mixture = mixture_of(known)
    if mixture is None:
        return weights, {}
    split = SplitExperts(weights, mixture)
    if split.stacks and mixture.transposed:
        raise unsupported_error("the matrices of its experts are stored as (in, out)", kind)
    return split, split.stacks


def _start(folder: ModelFolder, config: Any) -> tuple[int, int]:
    """Return a decoder's first token and how many tokens it knows."""
    first = first_token(folder.generation_settings(config))
    if first is None:
        raise unsupported_error(NO_FIRST_TOKEN, config.model_type)
    known = next((size for name in ("decoder_vocab_size", "tgt_vocab_size") if (size := folder.config.get(name))), None)
    return first, int(known or config.vocab_size)


def _build(config: Any, family: Family) -> Any:
    """Build the model; memory is reserved for its weights, and never touched."""
    config.use_cache = False
    try:
        with no_init_weights():
            loader = auto_model(family, config.to_dict())
            model = loader.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # the model's own code may raise anything
        raise unsupported_error(
            f"transformers cannot build it ({(str(error).strip() or type(error).__name__).splitlines()[0][:300]})",
            config.model_type,
        ) from error
    if any(True for _ in walk(model, Conv1D)):
        raise unsupported_error("its weights are stored as (in, out), with groups along the outputs", config.model_type)
    return model.eval().requires_grad_(False)


def unsupported_error(why: str, model_type: str) -> QuantizationError:
    """Return the error for a model that only methods without text take."""
    return QuantizationError(
        f"this {model_type} model is not calibrated: {why}",
        reason="CALIBRATION_UNSUPPORTED",
        remedy="use method rtn, which needs no calibration",
        about={"model_type": model_type},
    )

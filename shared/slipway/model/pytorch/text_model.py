"""A merged text model for formats that trace it: loaded once, its layers in one form, its limits, and the files beside its program."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from slipway.distribution import installed_version
from slipway.errors import CheckpointValidationError, FormatExportError
from slipway.files.regular_file import sha256_of
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, Family, auto_model
from slipway.model.folder import ModelFolder
from slipway.model.limits import length_thresholds, position_thresholds
from slipway.model.model_facts import CannotBuildError, check_loadable, most_tokens
from slipway.model.model_files import CONFIG, copy_companions
from slipway.model.pytorch.traced_forms import StaticDecoder
from slipway.model.sentences import SENTENCE_EMBEDDING, Pooling, UnknownPoolingError, load_pooling, pool
from slipway.stage import Context

_LONGEST_MESSAGE = 500
_SAMPLE = 3
"""Tokens of the sample."""


@dataclass(frozen=True)
class TextModel:
    """A model to trace.

    Attributes:
        folder: Its folder.
        model: The model, in evaluation mode.
        family: Its family.
        most: Most tokens that it takes.
        title: The format's title, for messages.
        error: The format's class of errors.
    """

    folder: ModelFolder
    model: Any
    family: Family
    most: int
    title: str
    error: type[FormatExportError]

    @property
    def positions(self) -> int:
        """Most tokens that it takes in any calls.

        Beyond the length at which rotary frequencies change, cached keys keep those of their call, so results depend on how a text is
        cut into calls of a fixed length.
        """
        return min([self.most, *position_thresholds(self.model.config.get_text_config())])

    @property
    def thresholds(self) -> tuple[int, ...]:
        """Numbers of tokens beyond which its code computes otherwise: windows of attention, lengths of rotary embeddings."""
        return length_thresholds(self.model.config.get_text_config())

    def length(self, asked: int, ctx: Context) -> int:
        """Return the most tokens of a text: as many as are asked for, if the model takes them."""
        length = min(asked, self.positions)
        if length < asked:
            ctx.log.info(f"the model takes {length} tokens, fewer than the {asked} of max_length")
        return length

    def pooling(self, product: str, ctx: Context) -> Pooling | None:
        """Return how one vector of a text is made; None, with a warning, if the folder says it in a way that is not known."""
        try:
            return load_pooling(self.folder.path)
        except UnknownPoolingError as error:
            ctx.warn(f"the {product} gives no sentence embedding: {error}")
            return None

    def step_error(self, what: str, reason: str, error: Exception) -> FormatExportError:
        """Return the error for a step at which a format's library fails.

        Args:
            what: What cannot be done, behind the name of the model's class: ``cannot be lowered for ExecuTorch``.
            reason: The reason.
            error: What the library raised.
        """
        said = " ".join((str(error).strip() or type(error).__name__).split())[:_LONGEST_MESSAGE]
        name = type(self.model).__name__
        return self.error(
            f"{name} {what}: {type(error).__name__}: {said}",
            reason=reason,
            remedy=f"leave the {self.title} format out for this model",
            about={"architecture": name, "file": CONFIG},
        )


def open_text_model(
    folder: Path,
    refusal_reason: Callable[[ModelConfig], str],
    *,
    title: str,
    error: type[FormatExportError],
    dtype: torch.dtype = torch.float32,
    attention: str = "eager",
) -> TextModel:
    """Load the model of a folder.

    Args:
        folder: A transformers folder with safetensors.
        refusal_reason: Function that says why the format does not take a model; empty if it does.
        title: The format's title.
        error: The format's class of errors.
        dtype: Type in which the model computes.
        attention: Transformers' attention; plain where the class has no other.

    Raises:
        FormatExportError: Of the class ``error``: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """

    def invalid(message: str) -> FormatExportError:
        return error(
            f"transformers cannot load {folder.name!r}: {message}",
            reason="BASE_MODEL_INVALID",
            remedy="give a complete transformers model folder",
            about={"folder": folder.name},
        )

    try:
        opened = ModelFolder.open(folder)
    except CheckpointValidationError as fault:
        raise invalid(fault.message) from fault
    config, family, why = opened.config, opened.family, refusal_reason(opened.config)
    if why or family is None:
        raise error(
            why,
            reason="FAMILY_UNSUPPORTED",
            remedy=f"leave the {title} format out for this model",
            about={"family": config.description, "model_type": config.get("model_type")},
        )
    if config.get("quantization_config"):
        raise error(
            f"the model in {folder.name} is already quantized",
            reason="DTYPE_UNSUPPORTED",
            remedy="export the unquantized model",
            about={"file": CONFIG, "key": "quantization_config"},
        )
    try:
        check_loadable(opened, auto_model(family))
        model = _load(folder, family, dtype=dtype, attention=attention)
    except (
        CannotBuildError, CheckpointValidationError, OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError
    ) as fault:  # fmt: skip
        raise invalid(f"{type(fault).__name__}: {fault}") from fault
    return TextModel(opened, model.eval().requires_grad_(False), family, most_tokens(model), title, error)


def _load(folder: Path, family: Family, *, dtype: torch.dtype, attention: str) -> Any:
    """Load with the attention that is asked for, or with eager attention if the class has no other."""
    for each in dict.fromkeys((attention, "eager")):
        try:
            return auto_model(family).from_pretrained(
                str(folder),
                dtype=dtype,
                attn_implementation=each,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
        except ValueError:
            if each == "eager":
                raise
    raise AssertionError


def file_digest(path: Path, ctx: Context) -> str:
    """Return the SHA-256 of a written file, and tell the task, which need not compute it again."""
    ctx.check_cancelled()
    digest = sha256_of(path)
    ctx.digest(path, digest)
    return digest


def describe_program(
    folder: ModelFolder,
    target: Path,
    description: str,
    facts: Mapping[str, Any],
    *,
    libraries: Sequence[str],
    ctx: Context,
) -> None:
    """Copy the model's other files beside its program, and write the program's description, which is the task's facts too.

    Args:
        folder: The model's folder.
        target: Folder of the program.
        description: Name of the description's file.
        facts: What is said of the program.
        libraries: Distributions that made it.
        ctx: The task.
    """
    copy_companions(folder.path, target)
    described = {**facts, "libraries": {name: installed_version(name) for name in libraries}}
    (target / description).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    ctx.record(**described)


class TextReader(torch.nn.Module):
    """A model of a text: ``forward(tokens, mask)``, and the tokens' types if the model has several."""

    def __init__(self, model: Any, family: Family, pooling: Pooling | None) -> None:
        super().__init__()
        self.model, self._outputs, self._pooling = model, family.outputs, pooling

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the family, and then the sentence embedding if the model has one. All inputs: (1, S)."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)
        results = tuple(getattr(output, name) for name in self._outputs)
        if self._pooling is None:
            return results
        return (*results, pool(results[0], attention_mask, self._pooling))


@dataclass(frozen=True)
class Traceable:
    """A model as the module that becomes a program.

    Attributes:
        module: The module.
        sample: Inputs to trace it with.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
        max_length: Most tokens of a text.
        call_length: Most tokens of a call.
    """

    module: torch.nn.Module
    sample: tuple[torch.Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_length: int
    call_length: int


def traceable(source: TextModel, *, length: int, call_length: int, product: str, ctx: Context) -> Traceable:
    """Return a decoder with a cache of its own, or a reader of whole texts.

    Args:
        source: The model; its attention is chosen before.
        length: Most tokens of a text.
        call_length: Most tokens of a decoder's call.
        product: What the format makes, in warnings.
        ctx: The task.

    Raises:
        ValueError: As :class:`StaticDecoder`.
    """
    call_length = min(call_length, length)
    ids = torch.zeros(1, min(_SAMPLE, call_length), dtype=torch.int64)
    if source.family is DECODER:
        sample = (ids, torch.arange(ids.shape[1]))
        decoder = StaticDecoder(source.model, length)
        return Traceable(decoder, sample, ("input_ids", "cache_position"), ("logits",), length, call_length)
    pooling, types = source.pooling(product, ctx), has_token_types(source.model.config)
    return Traceable(
        TextReader(source.model, source.family, pooling),
        (ids, torch.ones_like(ids), *([torch.zeros_like(ids)] if types else [])),
        ("input_ids", "attention_mask", *(["token_type_ids"] if types else [])),
        (*source.family.outputs, *([SENTENCE_EMBEDDING] if pooling else [])),
        length,
        length,
    )


def has_token_types(config: Any) -> bool:
    """Return whether the model tells texts of a pair apart."""
    return (getattr(config, "type_vocab_size", 0) or 0) > 1


def use_linear_layers(model: Any) -> None:
    """Replace GPT-2's layers, which store (in, out), by linear ones, which store (out, in)."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Conv1D):
                setattr(parent, name, _as_linear(layer))


def _as_linear(layer: Any) -> torch.nn.Linear:
    given, made = layer.weight.shape
    linear = torch.nn.Linear(given, made, device="meta")
    linear.weight = torch.nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)
    linear.bias = layer.bias
    return linear

"""What a model without a language head makes of a text: keys for its pooling or its score, and the linear layers behind its pooling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import gguf

from slipway.errors import GGUFExportError
from slipway.files.json_documents import read_json, read_json_object
from slipway.model.model_files import CONFIG
from slipway.model.safetensors_file import TensorInfo, read_safetensors
from slipway.model.sentences import MODULE_FOLDER, MODULES, Dense, Pooling, UnknownPoolingError, read_pooling
from slipway.texts import quoted
from slipway_gguf.architectures.entry import Architecture, Piece
from slipway_gguf.architectures.views import rows
from slipway_gguf.metadata import Field, Parameters, field_of
from slipway_gguf.weights.planned import Part, Planned

RANK = "rank"
KINDS = {
    "mean": gguf.PoolingType.MEAN,
    "cls": gguf.PoolingType.CLS,
    "lasttoken": gguf.PoolingType.LAST,
    RANK: gguf.PoolingType.RANK,
}
"""llama.cpp's numbers of poolings, by sentence-transformers' names; the last one gives a score."""
NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last", RANK: RANK}
"""llama.cpp's names of them, as ``llama-server --pooling`` takes them."""
_FIRST_LAYER = 2
"""Number of the first linear layer in names of tensors and keys: that of its folder in sentence-transformers, behind transformer and pooling."""
_TYPES = "tokenizer.ggml.token_type_count"
_SHARES = ("qwen3",)
"""Architectures whose scores llama.cpp turns into shares of a sum, so that two are needed."""
_YES, _NO = "yes", "no"
_SCORE = "cls.output.weight"
_LOGIT_SCORE = ".LogitScore"
"""End of the type of sentence-transformers' module that reads the logits of two tokens."""
_WEIGHT, _BIAS = "linear.weight", "linear.bias"


@dataclass(frozen=True, slots=True)
class Sentences:
    """What a model makes of a text.

    Attributes:
        pooling: How the vectors of tokens become one, by llama.cpp's name; ``rank`` for a score; empty if no file says how.
        normalized: Whether the vector gets the length 1.
        approximates: Whether llama.cpp approximates the GELU of the model by tanh.
        fields: Keys of the metadata.
        tensors: Linear layers behind the pooling.
    """

    pooling: str
    normalized: bool
    approximates: bool
    fields: tuple[Field, ...] = ()
    tensors: tuple[Planned, ...] = ()


def read_score(model: Path, parameters: Parameters, head: TensorInfo | None) -> Sentences | None:
    """Return the score that a decoder makes of a text by the logits of two tokens, as the files of sentence-transformers say (Qwen3-Reranker).

    Args:
        model: The model's folder.
        parameters: Its numbers.
        head: The tensor that makes logits; None if there is none.

    Returns:
        None for a decoder that makes no score.

    Raises:
        GGUFExportError: ``FAMILY_UNSUPPORTED`` for a score that llama.cpp does not compute, ``BASE_MODEL_INVALID`` for one of no tokens.
    """
    architecture, tokens = parameters.architecture, _score_tokens(model)
    if not tokens or head is None:
        return None
    if architecture.name not in _SHARES:
        raise GGUFExportError(
            f"{MODULES} says that the model makes a score of the logits of two tokens (LogitScore), and llama.cpp makes one of the last token "
            f"of {' and '.join(_SHARES)} alone; of {architecture.class_name} it reads the first token",
            reason="FAMILY_UNSUPPORTED",
            remedy=f"use another format for this model, or remove {MODULES} to get a file that predicts tokens alone",
            about={"architecture": architecture.name},
        )
    true, false = tokens
    # Without a second token the score is the first one's logit; llama.cpp needs two, so the second is zero.
    pieces = (
        Piece(take=rows(true, true + 1)),
        Piece(take=rows(max(false, 0), max(false, 0) + 1), factor=float(false >= 0)),
    )
    if max(tokens) >= head.shape[0]:
        raise _refused_error(
            architecture, f"its score is of the token {max(tokens)}, and its head has {head.shape[0]} rows"
        )
    made = Planned(_SCORE, (len(pieces), head.shape[1]), tuple(Part(head, piece) for piece in pieces))
    return Sentences(RANK, False, False, (_pooling_field(architecture, RANK), _labels(architecture)), (made,))


def _score_tokens(model: Path) -> tuple[int, int] | None:
    """Return the tokens whose logits make a score: for it, and against it (-1 for none); None if no module of the model says so."""
    try:
        listed = read_json(model / MODULES, lenient=True)
    except (OSError, ValueError):
        return None
    last = listed[-1] if isinstance(listed, list) and listed else None
    if not isinstance(last, dict) or not str(last.get("type")).endswith(_LOGIT_SCORE):
        return None
    folder = str(last.get("path"))
    if not MODULE_FOLDER.fullmatch(folder):
        raise _score_error(f"its folder is {quoted(folder)}")
    try:
        settings = read_json_object(model / folder / CONFIG, lenient=True)
    except (OSError, ValueError) as error:
        raise _score_error(f"its {CONFIG} cannot be read: {error}") from error
    true, false = (settings.get(f"{name}_token_id") for name in ("true", "false"))
    if not _is_token(true) or not (false is None or _is_token(false)):
        raise _score_error(f"its tokens are {quoted(true)} and {quoted(false)}")
    return true, -1 if false is None else false


def _is_token(number: object) -> TypeGuard[int]:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _score_error(what: str) -> GGUFExportError:
    return GGUFExportError(
        f"{MODULES} names a module that makes a score of the logits of two tokens (LogitScore), and {what}",
        reason="BASE_MODEL_INVALID",
        remedy=f"download the base model again, completely, or remove {MODULES} to get a file that predicts tokens alone",
    )


def read_sentences(model: Path, parameters: Parameters) -> Sentences:
    """Return what a model makes of a text, by the files of sentence-transformers beside it.

    Raises:
        GGUFExportError: ``FAMILY_UNSUPPORTED`` for a pooling or a layer behind it that llama.cpp does not compute.
    """
    architecture, settings = parameters.architecture, parameters.decoder.settings
    reading = architecture.reading
    assert reading is not None
    exact = settings.get("hidden_act", settings.get("hidden_activation")) == "gelu"
    approximates = reading.approximates and exact
    types = settings.get("type_vocab_size")
    fields = (field_of(_TYPES, types),) if isinstance(types, int) and types > 0 else ()
    if reading.scores:
        labels = (_labels(architecture),) if architecture.name in _SHARES else ()
        return Sentences(RANK, False, approximates, (*fields, _pooling_field(architecture, RANK), *labels))
    try:
        pooling = read_pooling(model)
    except UnknownPoolingError as error:
        raise _refused_error(architecture, f"its files say how a text becomes one vector, and {error}") from error
    if pooling is None:
        return Sentences("", False, approximates, fields)
    _check_pooling(architecture, pooling)
    layers = tuple(_layer(each, number) for number, each in enumerate(pooling.layers, _FIRST_LAYER))
    sizes = [
        field_of(f"{architecture.name}.dense_{number}_feat_{side}", size)
        for number, each in enumerate(pooling.layers, _FIRST_LAYER)
        for side, size in (("in", each.inputs), ("out", each.outputs))
    ]
    mode = pooling.modes[0]
    return Sentences(
        NAMES[mode],
        pooling.normalized,
        approximates,
        (*fields, _pooling_field(architecture, mode), *sizes),
        layers,
    )


def _pooling_field(architecture: Architecture, mode: str) -> Field:
    return field_of(f"{architecture.name}.pooling_type", int(KINDS[mode]))


def _labels(architecture: Architecture) -> Field:
    return field_of(f"{architecture.name}.classifier.output_labels", (_YES, _NO))


def _check_pooling(architecture: Architecture, pooling: Pooling) -> None:
    """Refuse a pooling, and layers behind it, that the graph does not compute."""
    reading = architecture.reading
    assert reading is not None
    if len(pooling.modes) > 1 or pooling.modes[0] not in reading.poolings:
        known = ", ".join(reading.poolings)
        raise _refused_error(architecture, f"its pooling is {' with '.join(pooling.modes)}, and llama.cpp has {known}")
    if len(pooling.layers) not in (0, reading.layers):
        what = f"{reading.layers} linear layers" if reading.layers else "no linear layer"
        raise _refused_error(
            architecture,
            f"{len(pooling.layers)} linear layers (Dense) follow its pooling, and llama.cpp computes {what} there",
        )
    for layer in pooling.layers:
        biased = _BIAS in read_safetensors(layer.file).tensors
        if layer.activation != "Identity" or biased:
            what = "a bias" if biased else f"the activation {quoted(layer.activation)}"
            raise _refused_error(
                architecture, f"a linear layer (Dense) behind its pooling has {what}, and in llama.cpp none has"
            )


def _layer(layer: Dense, number: int) -> Planned:
    tensor = read_safetensors(layer.file).tensors[_WEIGHT]
    return Planned(f"dense_{number}.weight", tensor.shape, (Part(tensor),))


def _refused_error(architecture: Architecture, what: str) -> GGUFExportError:
    return GGUFExportError(
        f"the model is a sentence encoder ({architecture.class_name}): {what}",
        reason="FAMILY_UNSUPPORTED",
        remedy="use another format for this model",
        about={"architecture": architecture.name},
    )

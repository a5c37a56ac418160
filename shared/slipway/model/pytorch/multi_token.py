"""Load a model's multi-token head from its stored tensors, and draft tokens with it.

A head has a layer of the model's own class. Of the text x, with the model's last hidden state h after its final norm, it computes at the token t

    layer(W · [norm(embedding(x[t + 1])); norm(h[t])])

and the head of the vocabulary, behind one more norm, makes of that the draft of x[t + 2]. Source: DeepSeek-V3, arXiv 2412.19437, section 2.2,
in the order of the two halves in which checkpoints store W. transformers' own class computes it. Its ``from_pretrained`` reads fewer files
than there are, so it gets here what it asks of a model: names of the tensors, and settings of the layer.

B = texts, T = tokens, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import modeling_layers
from transformers.cache_utils import MtpCache
from transformers.conversion_mapping import get_model_conversion_mapping

from slipway.model.folder import ModelFolder
from slipway.model.pytorch.wide_layers import widen_while_computing
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights.parts import ModelPart, PartTensor

_OF_THEIR_OWN = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Types whose head is stored under names of its own (``mtp.``); its layer has full attention. transformers has no settings for it."""
_BEHIND_THE_LAST = ("deepseek_v3", "glm4_moe")
"""Types whose head is a layer behind the last one, with an embedding and a head of the vocabulary beside it."""
_LAYER = re.compile(r"layers\.(\d+)\.")
_SHOWN = 200


class HeadNotUnderstoodError(Exception):
    """A head has a form that is not known here; the message names it."""


class MtpModel(modeling_layers.MtpModel):  # type: ignore[misc] # transformers has no types here
    """transformers' head, which refuses tensors that it has no place for.

    The conversions of stored tensors are looked up by the name of the class, so it is the one of transformers' class; and for transformers' own
    classes alone.
    """

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: all that computes is transformers' own."""
        return False

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        super()._adjust_missing_and_unexpected_keys(loading_info)
        for what, names in (
            ("has no place for", loading_info.unexpected_keys),
            ("lacks", loading_info.missing_keys),
            ("has another shape for", [each[0] for each in loading_info.mismatched_keys]),
        ):
            if names:
                raise HeadNotUnderstoodError(f"it {what} {len(names)} of its tensors, first {min(names)!r}")


class DraftingHead(nn.Module):
    """A multi-token head beside its model, whose first layer drafts.

    Args:
        computing: transformers' head.
        layers: Number of its layers.
    """

    def __init__(self, computing: Any, layers: int) -> None:
        super().__init__()
        self.computing, self.layers = computing, layers

    @torch.no_grad()
    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the draft of the token behind each next one. states: (B, T, H), tokens: (B, T) -> logits (B, T - 1, V)."""
        places = torch.arange(1, tokens.shape[1])[None].expand(len(tokens), -1)
        cache = MtpCache(config=self.computing.config)
        hidden = self.computing.forward_layer(0, states[:, :-1], places, cache, input_ids=tokens[:, 1:])
        logits: Tensor = self.computing.shared_head(hidden)
        return logits

    def widen(self) -> Callable[[], None]:
        """Compute in float32 from here on; return a function that lets go of what that needs."""
        restore = widen_while_computing(self)
        self.float()
        return restore


def load_head(folder: ModelFolder, model: Any) -> DraftingHead:
    """Load the multi-token head of a folder, in float32, beside its model.

    The model's embedding and head of the vocabulary serve the head too, with whatever an adapter does to them, unless the folder has its own.

    Args:
        folder: A folder with ``config.json`` and safetensors.
        model: transformers' model of this folder; peft may have changed its layers.

    Raises:
        HeadNotUnderstoodError: The head has a form that is not known here.
        CheckpointValidationError: As :func:`slipway.model.safetensors_file.read_weights`.
    """
    stored, kind = folder.parts[ModelPart.MULTI_TOKEN_HEAD], model.config.get_text_config().model_type
    if kind not in (*_OF_THEIR_OWN, *_BEHIND_THE_LAST):
        raise HeadNotUnderstoodError(f"multi-token heads of models of the type {kind} are not known here")
    if not stored:
        raise HeadNotUnderstoodError("the model has none")
    layers = _count_layers(stored, model.config.get_text_config(), kind)
    try:
        shell = _make_shell(folder, model, layers=layers)
        computing = MtpModel.from_pretrained(shell, trust_remote_code=False)
    except HeadNotUnderstoodError:
        raise
    except Exception as error:  # the classes of models raise anything for settings and tensors that they do not expect
        said = " ".join((str(error) or type(error).__name__).split())[:_SHOWN]
        raise HeadNotUnderstoodError(f"transformers cannot load it: {said}") from error
    _share(computing, model, {each.place: folder.tensors[each.name] for each in stored})
    if any(tensor.is_meta for tensor in (*computing.parameters(), *computing.buffers())):
        raise HeadNotUnderstoodError("some of its values are not stored")
    norm = type(shell.get_decoder().norm)
    if not all(type(layer.enorm) is norm for layer in computing.layers):
        raise HeadNotUnderstoodError(f"its norms would not be {norm.__name__}, as those of the model")
    return DraftingHead(computing.eval(), layers)


def _count_layers(stored: Sequence[PartTensor], config: Any, kind: str) -> int:
    """Return the number of layers that the stored tensors have; one after the other, and one alone if they are stored apart."""
    apart = kind in _OF_THEIR_OWN
    if any(each.place.startswith("mtp.") is not apart for each in stored):
        raise HeadNotUnderstoodError(
            f"its tensors do not have the names of a model of the type {kind}: {stored[0].name!r}"
        )
    numbers = sorted({int(match[1]) for each in stored if (match := _LAYER.search(each.place))})
    first = 0 if apart else config.num_hidden_layers
    if numbers != list(range(first, first + len(numbers))) or not numbers or (apart and len(numbers) > 1):
        raise HeadNotUnderstoodError(f"its layers have the numbers {', '.join(map(str, numbers[:8])) or 'none'}")
    return len(numbers)


def _make_shell(folder: ModelFolder, model: Any, *, layers: int) -> Any:
    """Return the model without its values and without an adapter, with what transformers' head asks of it."""
    config = copy.deepcopy(model.config)
    config.name_or_path, config.dtype = str(folder.path), torch.float32
    text = config.get_text_config()
    text.num_mtp_layers = layers
    if text.model_type in _OF_THEIR_OWN:
        text.mtp_layer_types = ["full_attention"] * layers
    with torch.device("meta"):
        shell = type(model)._from_config(config)
    # A model of text and images has these for names within its text model, where a head is not.
    shell._weight_conversions = get_model_conversion_mapping(shell.get_decoder())
    # By these patterns transformers finds a head's tensors; its own have the numbers of published models' layers alone.
    numbers = range(text.num_hidden_layers, text.num_hidden_layers + layers)
    behind = [rf"(?:^|\.)layers\.{number}\." for number in numbers]
    shell._keys_to_ignore_on_load_unexpected = [r"(?:^|\.)mtp\."] if text.model_type in _OF_THEIR_OWN else behind
    return shell


def _share(computing: Any, model: Any, stored: Mapping[str, TensorInfo]) -> None:
    """Give the head the modules that it shares with the model, and its own in place of those that it has itself."""
    computing.tie_with_main_model(_Shared(model))
    for place, info in stored.items():
        # Those of the first layer, which drafts.
        if not place.startswith(f"layers.{model.config.get_text_config().num_hidden_layers}."):
            continue
        if place.endswith(".embed_tokens.weight"):
            matrix = _matrix(info, model.get_input_embeddings())
            embedding = nn.Embedding(matrix.shape[0], matrix.shape[1], device="meta")
            embedding.weight = nn.Parameter(matrix, requires_grad=False)
            computing.embed_tokens = embedding
        elif place.endswith(".shared_head.head.weight"):
            weight = _matrix(info, model.get_output_embeddings())
            head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            head.weight = nn.Parameter(weight, requires_grad=False)
            computing.shared_head = head


class _Shared:
    """What transformers' head takes of a model that an adapter may have changed."""

    def __init__(self, model: Any) -> None:
        self.lm_head = model.get_output_embeddings()
        self.get_input_embeddings, self.get_decoder = model.get_input_embeddings, model.get_decoder


def _matrix(info: TensorInfo, beside: Any) -> Tensor:
    """Read a matrix of the vocabulary, in its stored type, of the same width as the model's."""
    width = beside.weight.shape[-1]
    if len(info.shape) != 2 or info.shape[1] != width or info.dtype not in ("F32", "F16", "BF16"):
        raise HeadNotUnderstoodError(
            f"{info.name!r} is {info.dtype} of the shape {info.shape}, for states of {width} values"
        )
    with safe_open(info.file, framework="pt") as file:
        values: Tensor = file.get_tensor(info.name)
    return values

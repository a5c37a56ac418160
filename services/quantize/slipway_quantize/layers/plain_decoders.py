"""The layers of decoders whose tensors leave no doubt of them, without the model's own code. Imports no libraries.

Most decoders have the same seven linear layers in each block, named alike, and a head. If ``config.json`` names a class of this table, states
every size and nothing unusual, and the stored matrices are exactly those that follow, by name and shape, then so are the layers. Whatever
differs in the least is left to the model's code. Tests compare both for every row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slipway.model.configuration import ModelConfig
from slipway.model.safetensors_file import TensorInfo
from slipway_quantize.layers.structure import LinearWeight, Structure
from slipway_quantize.layers.usual_settings import TYPES, are_usual

_MATRIX = 2
"""Axes of a matrix."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head"
_NORMS = ("input_layernorm", "post_attention_layernorm")
_FEEDFORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_QUERY_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True, slots=True)
class PlainDecoder:
    """A class of decoders in transformers.

    Attributes:
        name: Its name.
        norms: Modules of a block with one row of weights.
        tied: Whether the head shares the weight of the embedding where ``config.json`` does not say.
        head_width: Width of a head of attention where ``config.json`` does not say; 0: the hidden size, divided by the number of heads.
    """

    name: str
    norms: tuple[str, ...] = _NORMS
    tied: bool = False
    head_width: int = 0


PLAIN_DECODERS: Mapping[str, PlainDecoder] = {
    "gemma": PlainDecoder("GemmaForCausalLM", tied=True, head_width=256),
    "gemma2": PlainDecoder("Gemma2ForCausalLM", (*_NORMS, *_FEEDFORWARD_NORMS), tied=True, head_width=256),
    "gemma3_text": PlainDecoder(
        "Gemma3ForCausalLM", (*_NORMS, *_FEEDFORWARD_NORMS, *_QUERY_NORMS), tied=True, head_width=256
    ),
    "granite": PlainDecoder("GraniteForCausalLM"),
    "llama": PlainDecoder("LlamaForCausalLM"),
    "mistral": PlainDecoder("MistralForCausalLM"),
    "olmo2": PlainDecoder("Olmo2ForCausalLM", (_NORMS[1], _FEEDFORWARD_NORMS[1], *_QUERY_NORMS)),
    "olmo3": PlainDecoder("Olmo3ForCausalLM", (_NORMS[1], _FEEDFORWARD_NORMS[1], *_QUERY_NORMS)),
    "qwen2": PlainDecoder("Qwen2ForCausalLM"),
    "qwen3": PlainDecoder("Qwen3ForCausalLM", (*_NORMS, *_QUERY_NORMS), head_width=128),
    "smollm3": PlainDecoder("SmolLM3ForCausalLM", tied=True),
}
"""By ``model_type``. None of them keeps linear layers in float32 or renames tensors while it loads."""


def plain_structure(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> Structure | None:
    """Return how a model uses its tensors; None if only its own code can tell."""
    kind = config.get("model_type")
    decoder = PLAIN_DECODERS.get(kind) if isinstance(kind, str) else None
    if decoder is None or config.get("architectures") != [decoder.name] or not are_usual(config):
        return None
    sizes = _sizes_of(config, decoder)
    if sizes is None or sizes.layers > len(tensors):
        return None
    shapes = dict(_matrices(sizes))
    if f"{_HEAD}.weight" in tensors or not config.get("tie_word_embeddings", decoder.tied):
        shapes[f"{_HEAD}.weight"] = (sizes.vocabulary, sizes.hidden)
    if not _are_all(tensors, shapes | {_EMBEDDING: (sizes.vocabulary, sizes.hidden)}, sizes, decoder):
        return None
    linear = [LinearWeight(name.removesuffix(".weight"), name) for name in shapes]
    if f"{_HEAD}.weight" not in shapes:
        linear.append(LinearWeight(_HEAD, _EMBEDDING, tied=True))
    dtype: str = config.get("dtype") or config.get("torch_dtype") or ""
    return Structure(
        model_type=str(kind),
        linear=tuple(linear),
        kept=(),
        head=_HEAD,
        unpacked=False,
        dtype=TYPES.get(dtype),
        layers=sizes.layers,
    )


def _are_all(
    tensors: Mapping[str, TensorInfo],
    shapes: Mapping[str, tuple[int, ...]],
    sizes: _Sizes,
    decoder: PlainDecoder,
) -> bool:
    """Return whether the tensors of a model are these matrices, and rows of its norms and biases."""
    small = {f"model.layers.{number}.{norm}.weight" for number in range(sizes.layers) for norm in decoder.norms}
    small |= {"model.norm.weight", *(f"{name.removesuffix('weight')}bias" for name in shapes)}
    known = all(
        info.shape == shapes.get(name) or (len(info.shape) < _MATRIX and name in small)
        for name, info in tensors.items()
    )
    return known and shapes.keys() <= tensors.keys()


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a decoder, in values."""

    vocabulary: int
    hidden: int
    wide: int
    layers: int
    queries: int
    keys: int


def _sizes_of(config: ModelConfig, decoder: PlainDecoder) -> _Sizes | None:
    """Return the sizes that usual settings state; None if they leave one open, or state one that no model has."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    stated = [config.get(name, 0) for name in (*names, "num_key_value_heads")]
    if min(stated) <= 0:
        return None
    vocabulary, hidden, wide, layers, heads, groups = stated
    width = config.get("head_dim", decoder.head_width or hidden // heads)
    lists = [config[name] for name in ("layer_types", "no_rope_layers") if name in config]
    if width <= 0 or hidden % heads or any(len(each) != layers for each in lists):
        return None
    return _Sizes(vocabulary, hidden, wide, layers, heads * width, groups * width)


def _matrices(sizes: _Sizes) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name and shape (N, K) of the weight of each linear layer of the blocks, in the order of the model."""
    hidden, wide = sizes.hidden, sizes.wide
    block = {
        "self_attn.q_proj": (sizes.queries, hidden),
        "self_attn.k_proj": (sizes.keys, hidden),
        "self_attn.v_proj": (sizes.keys, hidden),
        "self_attn.o_proj": (hidden, sizes.queries),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    for number in range(sizes.layers):
        for name, shape in block.items():
            yield f"model.layers.{number}.{name}.weight", shape

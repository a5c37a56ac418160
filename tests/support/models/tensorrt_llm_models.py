"""Tiny models of every class that is written as a TensorRT-LLM checkpoint, and a reader that computes them from the checkpoint's folder alone.

The reader follows TensorRT-LLM 1.2 (``layers/attention.py``, ``layers/mlp.py``, ``models/*/model.py``, ``models/modeling_utils.py``), and knows nothing
of how the folder was written: each rank computes its own heads and its own part of the MLP, and results are added where TensorRT-LLM adds them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, silu

from slipway.stage import Context
from slipway_tensorrt_llm.params import TensorRTLLMParams
from slipway_tensorrt_llm.stage import STAGE

VOCABULARY = 101
"""Not to be divided by 2, so that the head has rows of zeros."""
QK_EPSILON = 1e-5
"""Of norms of queries and keys: ``Attention`` is made with its default, whatever the model says."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "pad_token_id": None,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def _longrope(width: int, original: int) -> dict[str, Any]:
    short = [1.0 + 0.05 * index for index in range(width // 2)]
    return {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original,
        "short_factor": short, "long_factor": [2 * factor for factor in short],
    }  # fmt: skip


def _gemma(layers: int, period: int, **more: Any) -> dict[str, Any]:
    kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    return {
        "num_hidden_layers": layers, "layer_types": kinds, "sliding_window": 8, "head_dim": 32, "query_pre_attn_scalar": 24,
        "vocab_size": 102, **more,
    }  # fmt: skip


def _of(name: str, **more: Any) -> Callable[[], Any]:
    config = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    return lambda: getattr(tf, f"{name}ForCausalLM")(getattr(tf, config)(**{**_SIZES, **more}))


def _gpt2() -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _of("Llama"),
    "llama-bias": _of("Llama", attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama-one-kv": _of("Llama", num_key_value_heads=1, tie_word_embeddings=True),
    "llama3": _of("Llama", rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "llama-linear": _of("Llama", rope_parameters=_LINEAR),
    "mistral": _of("Mistral", head_dim=32, sliding_window=None),
    "mistral-window": _of("Mistral", head_dim=16, sliding_window=8),
    "qwen2": _of("Qwen2", tie_word_embeddings=False),
    "qwen2-window": _of("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": _of("Qwen3", head_dim=32, tie_word_embeddings=True),
    "qwen3-yarn": _of("Qwen3", head_dim=32, tie_word_embeddings=False, rope_parameters=_YARN),
    "gemma": _of("Gemma", head_dim=32, vocab_size=102),
    "gemma2": _of("Gemma2", **_gemma(4, 2)),
    "gemma3": _of("Gemma3", **_gemma(6, 6)),
    "phi3": _of("Phi3"),
    "phi3-part": _of(
        "Phi3", rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    ),
    "phi3-long": _of("Phi3", original_max_position_embeddings=16, rope_parameters=_longrope(16, 16)),
    "phi3-short": _of(
        "Phi3", max_position_embeddings=1024, original_max_position_embeddings=512, rope_parameters=_longrope(16, 512)
    ),
    "gpt2": _gpt2,
}


def save_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model in which every weight matters, and return it: norms and biases differ from 1 and 0, and positions can be told apart."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.08))
    model.to(dtype).save_pretrained(folder)
    return model


def write_checkpoint(model: Path, workdir: Path, **params: Any) -> tuple[Path, Context]:
    """Run the stage; return the checkpoint, and the context with its facts."""
    workdir.mkdir(exist_ok=True)
    ctx = Context(workdir=workdir)
    return STAGE.run({"pytorch": model}, TensorRTLLMParams(**params), ctx)["tensorrt_llm"], ctx


def logits_of(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return transformers' logits in float64. (tokens, vocabulary)."""
    with torch.no_grad():
        return model.double()(torch.tensor([list(tokens)])).logits[0]


class Reader:
    """Computes the model of a checkpoint, in float64."""

    def __init__(self, folder: Path) -> None:
        self.fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
        mapping = self.fields["mapping"]
        self.tp, self.pp = mapping["tp_size"], mapping["pp_size"]
        assert mapping["world_size"] == self.tp * self.pp
        files = sorted(folder.glob("rank*.safetensors"))
        assert [file.name for file in files] == [f"rank{rank}.safetensors" for rank in range(self.tp * self.pp)]
        self.ranks = [{name: value.double() for name, value in load_file(file).items()} for file in files]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits. (tokens, vocabulary)."""
        fields, ids = self.fields, torch.tensor(list(tokens))
        states = self._embedded(ids)
        layers = fields["num_hidden_layers"] // self.pp
        for group in range(self.pp):
            ranks = self.ranks[group * self.tp : (group + 1) * self.tp]
            for local in range(layers):
                states = self._layer(states, ranks, f"transformer.layers.{local}.", group * layers + local)
        ranks = self.ranks[-self.tp :]
        states = self._norm(states, ranks[0], "transformer.ln_f")
        logits = torch.cat([states @ rank["lm_head.weight"].T for rank in ranks], -1)
        assert not logits[:, fields["vocab_size"] :].any(), "rows that fill the head up are zero"
        logits = logits[:, : fields["vocab_size"]]
        cap = fields.get("final_logit_softcapping")
        return torch.tanh(logits / cap) * cap if cap else logits

    def _embedded(self, ids: Tensor) -> Tensor:
        ranks = self.ranks[: self.tp]
        tables = [rank["transformer.vocab_embedding.weight"] for rank in ranks]
        states = (torch.cat(tables) if self.fields["use_parallel_embedding"] else tables[0])[ids]
        assert self.fields["use_parallel_embedding"] or all(table.equal(tables[0]) for table in tables)
        if self.fields["architecture"].startswith("Gemma"):
            states = states * math.sqrt(self.fields["hidden_size"])
        if self.fields["position_embedding_type"] == "learned_absolute":
            states = states + ranks[0]["transformer.position_embedding.weight"][: len(ids)]
        return states

    def _layer(self, states: Tensor, ranks: list[dict[str, Tensor]], layer: str, index: int) -> Tensor:
        first = ranks[0]
        given = self._norm(states, first, f"{layer}input_layernorm")
        attended = sum(self._attention(given, rank, layer, index) for rank in ranks)
        attended = attended + first.get(f"{layer}attention.dense.bias", 0.0)
        if f"{layer}pre_feedforward_layernorm.weight" in first:
            states = states + self._norm(attended, first, f"{layer}post_layernorm")
            given = self._norm(states, first, f"{layer}pre_feedforward_layernorm")
        else:
            states = states + attended
            given = self._norm(states, first, f"{layer}post_layernorm")
        made = sum(self._mlp(given, rank, layer) for rank in ranks) + first.get(f"{layer}mlp.proj.bias", 0.0)
        if f"{layer}post_feedforward_layernorm.weight" in first:
            made = self._norm(made, first, f"{layer}post_feedforward_layernorm")
        return states + made

    def _attention(self, given: Tensor, rank: dict[str, Tensor], layer: str, index: int) -> Tensor:
        fields = self.fields
        heads, width = fields["num_attention_heads"] // self.tp, fields["head_size"]
        kv_heads = (fields["num_key_value_heads"] + self.tp - 1) // self.tp
        joined = given @ rank[f"{layer}attention.qkv.weight"].T + rank.get(f"{layer}attention.qkv.bias", 0.0)
        q, k, v = joined.view(len(given), -1, width).split([heads, kv_heads, kv_heads], 1)  # (tokens, heads, width)
        if f"{layer}attention.q_layernorm.weight" in rank:
            q, k = (
                _rms(each, rank[f"{layer}attention.{one}_layernorm.weight"], QK_EPSILON)
                for one, each in (("q", q), ("k", k))
            )
        q, k = self._rotated(q, index), self._rotated(k, index)
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        scalar = fields.get("query_pre_attn_scalar") or width
        scores = torch.einsum("qhw,khw->hqk", q, k) / math.sqrt(scalar)
        if cap := fields.get("attn_logit_softcapping"):
            scores = torch.tanh(scores / cap) * cap
        places = torch.arange(len(given))
        back = places[:, None] - places[None]
        scores = scores.masked_fill((back < 0) | (back >= self._window(index)), -math.inf)
        values = torch.einsum("hqk,khw->qhw", scores.softmax(-1), v).reshape(len(given), -1)
        return values @ rank[f"{layer}attention.dense.weight"].T

    def _window(self, index: int) -> int:
        windows = (self.fields.get("runtime_defaults") or {}).get("max_attention_window") or [
            self.fields["max_position_embeddings"]
        ]
        return windows[index % len(windows)]

    def _mlp(self, given: Tensor, rank: dict[str, Tensor], layer: str) -> Tensor:
        act = self.fields["hidden_act"]
        inner = given @ rank[f"{layer}mlp.fc.weight"].T + rank.get(f"{layer}mlp.fc.bias", 0.0)
        if act == "swiglu":
            up, gate = inner.chunk(2, -1)
            inner = silu(gate) * up
        else:
            inner = silu(inner) if act == "silu" else gelu(inner, approximate="tanh")
            if f"{layer}mlp.gate.weight" in rank:
                inner = inner * (given @ rank[f"{layer}mlp.gate.weight"].T + rank.get(f"{layer}mlp.gate.bias", 0.0))
        return inner @ rank[f"{layer}mlp.proj.weight"].T

    def _norm(self, states: Tensor, rank: dict[str, Tensor], name: str) -> Tensor:
        weight, epsilon = rank[f"{name}.weight"], self.fields["norm_epsilon"]
        if f"{name}.bias" in rank:
            return layer_norm(states, weight.shape, weight, rank[f"{name}.bias"], epsilon)
        return _rms(states, weight, epsilon)

    def _rotated(self, heads: Tensor, index: int) -> Tensor:
        """Turn each head of each token by its place. heads: (tokens, heads, width)."""
        if not self.fields["position_embedding_type"].startswith(("rope", "long_rope")):
            return heads
        rates, scale = self._rates(index, len(heads))
        size = 2 * len(rates)
        angles = torch.arange(len(heads), dtype=torch.float64)[:, None] * rates  # (tokens, size / 2)
        cos, sin = (torch.cat([each, each], -1)[:, None] * scale for each in (angles.cos(), angles.sin()))
        turned, kept = heads[..., :size], heads[..., size:]
        one, other = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-other, one], -1) * sin, kept], -1)

    def _rates(self, index: int, tokens: int) -> tuple[Tensor, float]:
        fields = self.fields
        size = int(fields["head_size"] * fields.get("rotary_pct", 1.0))
        base = fields["rotary_base"]
        period = fields.get("_sliding_window_pattern")
        if period and (index + 1) % period:
            base = fields["rope_local_base_freq"]
        rates = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        if fields["position_embedding_type"] == "long_rope":
            original, most = fields["original_max_position_embeddings"], fields["max_position_embeddings"]
            key = "long" if tokens > original else "short"
            factors = torch.tensor(fields[f"longrope_scaling_{key}_factors"], dtype=torch.float64)
            times = most / original
            return rates / factors, math.sqrt(1 + math.log(times) / math.log(original)) if times > 1 else 1.0
        given = fields["rotary_scaling"] or {}
        match given.get("type", given.get("rope_type")):
            case None:
                return rates, 1.0
            case "linear":
                return rates / given["factor"], 1.0
            case "llama3":
                return _llama3(rates, given), 1.0
            case "yarn":
                return _yarn(rates, size, base, given), 0.1 * math.log(given["factor"]) + 1.0
        raise AssertionError(given)


def _rms(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def _llama3(rates: Tensor, given: dict[str, Any]) -> Tensor:
    original, low, high = given["original_max_position_embeddings"], given["low_freq_factor"], given["high_freq_factor"]
    made = []
    for rate in rates.tolist():
        length = 2 * math.pi / rate
        if length < original / high:
            made.append(rate)
        elif length > original / low:
            made.append(rate / given["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            made.append((1 - smooth) * rate / given["factor"] + smooth * rate)
    return torch.tensor(made, dtype=torch.float64)


def _yarn(rates: Tensor, size: int, base: float, given: dict[str, Any]) -> Tensor:
    def dimension(rotations: float) -> float:
        return (
            size
            * math.log(given["original_max_position_embeddings"] / (rotations * 2 * math.pi))
            / (2 * math.log(base))
        )

    low = max(math.floor(dimension(given["beta_fast"])), 0)
    high = min(math.ceil(dimension(given["beta_slow"])), size - 1)
    ramp = ((torch.arange(size // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)).clamp(0, 1)
    return rates / given["factor"] * ramp + rates * (1 - ramp)

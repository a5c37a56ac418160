"""Multi-token heads: what they draft is the formula of their publication, and a head of an unknown form is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from transformers.masking_utils import create_causal_mask

from slipway.model.folder import ModelFolder
from slipway.model.pytorch.multi_token import HeadNotUnderstoodError, load_head
from slipway.model.weights.parts import ModelPart, find_parts
from slipway.proof.transformers_runtime import from_pretrained
from support.models.current_kinds import make_kind
from support.models.multi_token import BEHIND_THE_LAST, WEIGHTS, Tensors, drop, edit_tensors

Values = npt.NDArray[np.float64]
TOKENS = np.array([5, 17, 250, 3, 99, 260, 17, 8, 42])
HEADS, KEYS, WIDTH, ROTATED, EPSILON = 4, 2, 32, 8, 1e-6
"""Of the tiny Qwen3.5: heads of queries and of keys, values of a head, how many of them turn with the position, and its norms' epsilon."""


def states_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states, behind the model's final norm. (B, T) -> (B, T, H)"""
    with torch.no_grad():
        states: torch.Tensor = model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states[-1]
    return states


def norm(values: Values, weight: Values) -> Values:
    """Normalize as Qwen3.5 does, whose norms store how far they are from one. (…, N)"""
    return values / np.sqrt((values**2).mean(-1, keepdims=True) + EPSILON) * (1 + weight)


def turn(values: Values, places: Values) -> Values:
    """Turn the first values of each head with the position. values: (heads, T, WIDTH)"""
    angles = places[:, None] / 10000 ** (np.arange(0, ROTATED, 2) / ROTATED)
    cosines, sines = np.cos(angles), np.sin(angles)
    first, second, rest = np.split(values, [ROTATED // 2, ROTATED], axis=-1)
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines, rest], axis=-1)


def draft_of_qwen(tensors: dict[str, Values], states: Values, tokens: npt.NDArray[np.int64]) -> Values:
    """Compute the drafts of a Qwen3.5 head. states: (T, H), tokens: (T,) -> logits (T - 1, V)"""

    def of(name: str) -> Values:
        return tensors[f"mtp.{name}.weight"]

    embedded = norm(tensors["model.embed_tokens.weight"][tokens[1:]], of("pre_fc_norm_embedding"))
    hidden = np.concatenate([embedded, norm(states[:-1], of("pre_fc_norm_hidden"))], axis=-1) @ of("fc").T
    count, places = len(hidden), np.arange(1.0, len(tokens))
    layer = "layers.0"
    inputs = norm(hidden, of(f"{layer}.input_layernorm"))
    both = (inputs @ of(f"{layer}.self_attn.q_proj").T).reshape(count, HEADS, 2 * WIDTH)
    queries, gates = both[..., :WIDTH].transpose(1, 0, 2), both[..., WIDTH:].reshape(count, -1)
    keys, values = (
        (inputs @ of(f"{layer}.self_attn.{name}").T).reshape(count, KEYS, WIDTH).transpose(1, 0, 2)
        for name in ("k_proj", "v_proj")
    )
    queries = turn(norm(queries, of(f"{layer}.self_attn.q_norm")), places)
    keys = turn(norm(keys, of(f"{layer}.self_attn.k_norm")), places)
    keys, values = (np.repeat(each, HEADS // KEYS, axis=0) for each in (keys, values))
    scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(WIDTH)
    scores = np.where(np.tril(np.ones((count, count), dtype=bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = (weights / weights.sum(-1, keepdims=True)) @ values
    gated = attended.transpose(1, 0, 2).reshape(count, -1) / (1 + np.exp(-gates))
    hidden = hidden + gated @ of(f"{layer}.self_attn.o_proj").T
    inputs = norm(hidden, of(f"{layer}.post_attention_layernorm"))
    gate = inputs @ of(f"{layer}.mlp.gate_proj").T
    hidden = (
        hidden + (gate / (1 + np.exp(-gate)) * (inputs @ of(f"{layer}.mlp.up_proj").T)) @ of(f"{layer}.mlp.down_proj").T
    )
    return norm(hidden, of("norm")) @ tensors["lm_head.weight"].T


def test_a_head_of_qwen_drafts_what_the_formula_says(tmp_path: Path) -> None:
    kind = make_kind("qwen3.5", tmp_path)
    model, _ = from_pretrained(kind.base, dtype="auto")
    tokens = torch.from_numpy(TOKENS)[None]
    states = states_of(model, tokens)
    drafts = load_head(ModelFolder.open(kind.base), model)(states, tokens)
    tensors = {name: each.double().numpy() for name, each in load_file(kind.base / WEIGHTS).items()}
    wanted = draft_of_qwen(tensors, states[0].double().numpy(), TOKENS)
    assert drafts.shape == (1, len(TOKENS) - 1, 320)
    assert np.abs(drafts[0].numpy() - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["glm4-moe", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_a_head_behind_the_last_layer_has_its_own_embedding_and_vocabulary(tmp_path: Path, name: str) -> None:
    kind = make_kind(name, tmp_path)
    model, _ = from_pretrained(kind.base, dtype="auto")
    tokens = torch.from_numpy(TOKENS)[None]
    states = states_of(model, tokens)
    drafts = load_head(ModelFolder.open(kind.base), model)(states, tokens)
    tensors = load_file(kind.base / WEIGHTS)

    def of(part: str) -> torch.Tensor:
        return tensors[f"{BEHIND_THE_LAST}{part}.weight"]

    def norm_of(values: torch.Tensor, part: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(values, (64,), of(part), eps=model.config.rms_norm_eps)

    # A model of one more layer, whose last layer is that of the head.
    config = tf.AutoConfig.from_pretrained(kind.base, num_hidden_layers=4)
    deeper = type(model).from_pretrained(kind.base, config=config).eval()
    with torch.no_grad():
        embedded = norm_of(of("embed_tokens")[tokens[:, 1:]], "enorm")
        hidden = torch.cat([embedded, norm_of(states[:, :-1], "hnorm")], dim=-1) @ of("eh_proj").T
        places = torch.arange(1, len(TOKENS))[None]
        mask = create_causal_mask(
            config=config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=places
        )
        turned = deeper.model.rotary_emb(hidden, position_ids=places)
        hidden = deeper.model.layers[3](
            hidden, attention_mask=mask, position_embeddings=turned, position_ids=places, past_key_values=None
        )
        wanted = norm_of(hidden, "shared_head.norm") @ of("shared_head.head").T
    assert torch.allclose(drafts, wanted, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["qwen3.5-moe-vision", "qwen3-next", "qwen3.5-moe", "qwen3.5-vision"])
@pytest.mark.slow
def test_heads_with_experts_and_beside_images_are_loaded_whole(tmp_path: Path, name: str) -> None:
    kind = make_kind(name, tmp_path)
    model, _ = from_pretrained(kind.base, dtype="auto")
    head = load_head(ModelFolder.open(kind.base), model)
    tokens = torch.from_numpy(TOKENS)[None].expand(2, -1)
    drafts = head(states_of(model, tokens), tokens)
    assert drafts.shape == (2, len(TOKENS) - 1, 320)
    assert torch.allclose(drafts[0], drafts[1], atol=1e-4)
    assert not any(each.is_meta for each in head.parameters())


def test_weights_in_16_bits_are_widened(tmp_path: Path) -> None:
    kind = make_kind("glm4-moe", tmp_path, dtype=torch.bfloat16)
    model, _ = from_pretrained(kind.base, dtype=torch.float32)
    head, tokens = load_head(ModelFolder.open(kind.base), model), torch.from_numpy(TOKENS)[None]
    restore = head.widen()
    assert head(states_of(model, tokens), tokens).dtype == torch.float32
    restore()


def add(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, torch.ones(shape))


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("qwen3.5", drop(lambda name: name == "mtp.layers.0.self_attn.k_norm.weight"), "lacks 1 of its tensors"),
        ("qwen3.5", add("mtp.layers.0.self_attn.q_proj.bias", 256), "has no place for 1 of its tensors"),
        ("qwen3.5", add("mtp.fc.weight", 64, 64), "another shape for 1 of its tensors"),
        ("qwen3.5", add("mtp.layers.1.input_layernorm.weight", 64), "its layers have the numbers 0, 1"),
        ("qwen3.5", add("model.layers.4.enorm.weight", 64), "do not have the names"),
        ("glm4-moe", add("model.layers.5.enorm.weight", 64), "its layers have the numbers 3, 5"),
        ("glm4-moe", add(f"{BEHIND_THE_LAST}embed_tokens.weight", 320, 32), "for states of 64 values"),
    ],
)
def test_a_head_of_an_unknown_form_is_refused_by_name(
    tmp_path: Path, kind: str, change: Callable[[Tensors], None], said: str
) -> None:
    base = edit_tensors(make_kind(kind, tmp_path).base, change)
    model, _ = from_pretrained(base, dtype="auto")
    with pytest.raises(HeadNotUnderstoodError, match=said):
        load_head(ModelFolder.open(base), model)


def test_a_head_of_a_model_of_another_type_is_refused(tmp_path: Path) -> None:
    tf.LlamaForCausalLM(
        tf.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    edit_tensors(tmp_path, add("mtp.fc.weight", 32, 64))
    model, _ = from_pretrained(tmp_path, dtype="auto")
    assert [each.place for each in ModelFolder.open(tmp_path).parts[ModelPart.MULTI_TOKEN_HEAD]] == ["mtp.fc.weight"]
    with pytest.raises(HeadNotUnderstoodError, match="models of the type llama"):
        load_head(ModelFolder.open(tmp_path), model)


def test_parts_are_found_by_name_under_any_prefix() -> None:
    names = [
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.2.eh_proj.weight",
        "model.mtp.fc.weight",
        "model.visual.blocks.3.attn.qkv.weight",
        "multi_modal_projector.linear_1.bias",
        "model.embed_tokens.weight",
        "visual.patch_embed.proj.weight",
    ]
    found = find_parts(names, layers=2)
    assert [(each.part, each.place) for each in found] == [
        (ModelPart.MULTI_TOKEN_HEAD, "layers.2.eh_proj.weight"),
        (ModelPart.MULTI_TOKEN_HEAD, "mtp.fc.weight"),
        (ModelPart.IMAGES_AND_SOUND, "visual.blocks.3.attn.qkv.weight"),
        (ModelPart.IMAGES_AND_SOUND, "multi_modal_projector.linear_1.bias"),
        (ModelPart.IMAGES_AND_SOUND, "visual.patch_embed.proj.weight"),
    ]
    assert [each.name for each in find_parts(names, layers=None)] == [
        name for name in sorted(names) if "layers." not in name and "embed_tokens" not in name
    ]

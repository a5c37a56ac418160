"""Training of the base model from random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slipway.sample.recipe import Recipe
from slipway.sample.tokenizer import END_OF_TEXT, TURN_END

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

_WARMUP_STEPS = 15
_CLIP_NORM = 1.0


def train_base(
    tokenizer: PreTrainedTokenizerFast,
    stream: Sequence[int],
    *,
    recipe: Recipe,
    seed: int,
    on_step: Callable[[int], None],
) -> Qwen3ForCausalLM:
    """A Qwen3 model trained on random windows of ``stream`` with AdamW; same seed and threads, same weights.

    Learning rate: linear warm-up, then linear to zero, which ends with a lower loss than a cosine of so few steps.
    """
    import torch

    model = new_model(tokenizer, recipe=recipe, seed=seed)
    tokens = torch.tensor(stream)  # (tokens,)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.base_learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_linear(step, recipe.base_steps))
    model.train()
    for step in range(recipe.base_steps):
        batch = _windows(tokens, recipe=recipe, generator=generator)  # (batch, sequence)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(step + 1)
    return model.eval()


def new_model(tokenizer: PreTrainedTokenizerFast, *, recipe: Recipe, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 model of the recipe's shape with random weights and tied embeddings."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    end_of_text, turn_end = tokenizer.convert_tokens_to_ids([END_OF_TEXT, TURN_END])
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=turn_end,
        pad_token_id=end_of_text,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    # A document ends with one token, a chat turn with the other: generation stops at either.
    model.generation_config.update(
        bos_token_id=end_of_text, eos_token_id=[turn_end, end_of_text], pad_token_id=end_of_text, do_sample=False
    )
    return model


def perplexity(model: Qwen3ForCausalLM, stream: Sequence[int], *, sequence: int) -> float:
    """Exp of the mean negative log likelihood per token, over windows of ``sequence`` tokens that do not overlap."""
    import torch

    count = len(stream) // sequence
    windows = torch.tensor(stream[: count * sequence]).reshape(count, sequence)
    with torch.no_grad():
        losses = [model(input_ids=part, labels=part).loss * len(part) for part in windows.split(16)]
    return float(torch.exp(torch.stack(losses).sum() / count))


def _windows(tokens: Tensor, *, recipe: Recipe, generator: object) -> Tensor:
    import torch

    starts = torch.randint(len(tokens) - recipe.sequence, (recipe.batch, 1), generator=generator)  # (batch, 1)
    return tokens[starts + torch.arange(recipe.sequence)]  # (batch, sequence)


def _warm_linear(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / _WARMUP_STEPS)
    return warm * (1 - step / steps)

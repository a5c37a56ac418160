"""Train the sample's models: its tokenizer, its base from random weights, and the LoRA on it.

The tokenizer is byte-level BPE with Qwen's special tokens and chat markup. The Hugging Face Trainer trains the LoRA, so that its
checkpoints are those of a real run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.sample.recipe import AdapterRecipe, Recipe

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.optim import Optimizer
    from transformers import (
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
        Qwen3ForCausalLM,
        TrainerCallback,
        TrainingArguments,
    )


_BASE_WARMUP_STEPS = 15
# Initial standard deviation of the embedding, which is tied to the output layer. Qwen's 0.02 suits thousands of steps, not hundreds.
_EMBEDDING_STD = 0.03
_CLIP_NORM = 1.0

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

# How Qwen splits text before BPE: contractions, words with the space before them, single digits, punctuation, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_base(
    tokenizer: PreTrainedTokenizerFast,
    stream: Sequence[int],
    *,
    recipe: Recipe,
    seed: int,
    on_step: Callable[[int], None],
) -> Qwen3ForCausalLM:
    """Return a Qwen3 model trained on random windows of ``stream`` with AdamW; same seed and threads, same weights.

    Learning rates warm up linearly, then fall linearly to zero. Products are computed in bfloat16 where the processor
    multiplies it natively, which halves the time; weights and optimizer stay in float32 everywhere.
    """
    import torch

    model = new_model(tokenizer, recipe=recipe, seed=seed)
    tokens = torch.tensor(stream)  # (tokens,)
    generator = torch.Generator().manual_seed(seed)
    optimizer = _optimizer(model, recipe)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_linear(step, recipe.base_steps))
    bfloat16 = native_bfloat16()
    model.train()
    for step in range(recipe.base_steps):
        batch = _windows(tokens, recipe=recipe, generator=generator)  # (batch, sequence)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(step + 1)
    return model.eval()


def new_model(tokenizer: PreTrainedTokenizerFast, *, recipe: Recipe, seed: int) -> Qwen3ForCausalLM:
    """Return a Qwen3 model of the recipe's shape with random weights and tied embeddings."""
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
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(_EMBEDDING_STD / config.initializer_range)
    # Faster than the fused kernel at so short a sequence, and not part of what is saved.
    model.set_attn_implementation("eager")
    # A document ends with one token, a chat turn with the other: generation stops at either.
    model.generation_config.update(
        bos_token_id=end_of_text, eos_token_id=[turn_end, end_of_text], pad_token_id=end_of_text, do_sample=False
    )
    return model


def native_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 natively; emulated, it would be slower than float32."""
    import torch

    capabilities: Mapping[str, Any] = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def perplexity(model: Qwen3ForCausalLM, stream: Sequence[int], *, sequence: int, windows: int) -> float:
    """Return the exponential of the mean negative log likelihood per token.

    Args:
        model: The model, in evaluation mode.
        stream: Token ids of the text.
        sequence: Tokens of one window; the first of each is only context.
        windows: Most windows, spread evenly over the text.
    """
    import torch

    count = len(stream) // sequence
    cut = torch.tensor(stream[: count * sequence]).reshape(count, sequence)
    chosen = cut[torch.linspace(0, count - 1, min(windows, count)).long()]  # (windows, sequence)
    with torch.no_grad():
        losses = [model(input_ids=part, labels=part).loss * len(part) for part in chosen.split(16)]
    return float(torch.exp(torch.stack(losses).sum() / len(chosen)))


def _optimizer(model: Qwen3ForCausalLM, recipe: Recipe) -> Optimizer:
    import torch

    embedding = model.get_input_embeddings().weight
    others = [parameter for parameter in model.parameters() if parameter is not embedding]
    groups = [
        {"params": others, "lr": recipe.base_learning_rate},
        {"params": [embedding], "lr": recipe.embedding_learning_rate},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _windows(tokens: Tensor, *, recipe: Recipe, generator: Generator) -> Tensor:
    import torch

    starts = torch.randint(len(tokens) - recipe.sequence, (recipe.batch, 1), generator=generator)  # (batch, 1)
    return tokens[starts + torch.arange(recipe.sequence)]  # (batch, sequence)


def _warm_linear(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / _BASE_WARMUP_STEPS)
    return warm * (1 - step / steps)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most ``vocab_size`` tokens; every byte is a token, so it can encode any text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> list[int]:
    """Return the token ids of all texts in order, each followed by the end-of-text token."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    stream: list[int] = []
    for text in texts:
        stream += tokenizer.backend_tokenizer.encode(text).ids
        stream.append(end)
    return stream


def train_adapter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Mapping[str, Sequence[int]]],
    *,
    base_name: str,
    folder: Path,
    recipe: AdapterRecipe,
    seed: int,
    on_step: Callable[[int], None],
) -> PreTrainedModel:
    """Train a LoRA on every linear layer and leave ``checkpoint-N`` folders in ``folder``.

    Args:
        model: The base model; it is wrapped, its own weights do not change.
        tokenizer: Saved into each checkpoint.
        samples: Token ids, labels and attention masks, all of one length.
        base_name: Written into the adapter's configuration as its base model.
        folder: Receives the checkpoints.
        recipe: Steps, rank, alpha and learning rate.
        seed: Seed of the adapter's weights and of the order of samples.
        on_step: Called after every optimizer step with the number of steps done.

    Returns:
        The model with its adapter, unmerged.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import PrinterCallback, Trainer, default_data_collator

    torch.manual_seed(seed)
    # Set the name as if the base had been loaded by it; ours was trained in this process.
    model.name_or_path = base_name
    lora = LoraConfig(
        r=recipe.rank, lora_alpha=recipe.alpha, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        # peft searches the base by name to check whether its vocabulary grew. It did not, and the name is not a path here.
        warnings.filterwarnings("ignore", message="Could not find a config file in")
        warnings.filterwarnings("ignore", message="Unable to fetch remote file")
        warnings.filterwarnings("ignore", category=FutureWarning)  # transformers warns about its own attributes
        adapted = get_peft_model(model, lora)
        trainer = Trainer(
            model=adapted,
            args=_training_arguments(folder, recipe=recipe, seed=seed),
            train_dataset=list(samples),
            data_collator=default_data_collator,
            processing_class=tokenizer,
            callbacks=[_step_reporter(on_step)],
        )
        trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is for the command's result
        trainer.train()
    return adapted.eval()


def _training_arguments(folder: Path, *, recipe: AdapterRecipe, seed: int) -> TrainingArguments:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.schedule,
        warmup_steps=recipe.warmup_steps,
        weight_decay=0.0,
        logging_steps=10,
        save_strategy="steps",
        save_steps=recipe.save_steps,
        use_cpu=True,
        bf16=native_bfloat16(),
        seed=seed,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )


def _step_reporter(on_step: Callable[[int], None]) -> TrainerCallback:
    from transformers import TrainerCallback

    class StepReporter(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            on_step(state.global_step)

    return StepReporter()

"""Train the LoRA adapter with the Hugging Face Trainer, so that its checkpoints are those of a real run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.sample.base import native_bfloat16
from slipway.sample.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback, TrainingArguments


def train_adapter(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stream: Sequence[int],
    *,
    base_name: str,
    folder: Path,
    recipe: Recipe,
    seed: int,
    on_step: Callable[[int], None],
) -> Qwen3ForCausalLM:
    """Train a LoRA on every linear layer and leave ``checkpoint-N`` folders in ``folder``.

    Args:
        model: The base model; it is wrapped, its own weights do not change.
        tokenizer: Saved into each checkpoint.
        stream: Token ids of the text to learn.
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
            args=_arguments(folder, recipe=recipe, seed=seed),
            train_dataset=_samples(stream, sequence=recipe.sequence),
            data_collator=default_data_collator,
            processing_class=tokenizer,
            callbacks=[_step_reporter(on_step)],
        )
        trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is for the command's result
        trainer.train()
    return adapted.eval()


def _arguments(folder: Path, *, recipe: Recipe, seed: int) -> TrainingArguments:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.adapter_steps,
        per_device_train_batch_size=recipe.batch,
        learning_rate=recipe.adapter_learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=10,
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


def _samples(stream: Sequence[int], *, sequence: int) -> list[dict[str, list[int]]]:
    """Cut the stream into training samples of consecutive windows; drop the remainder."""
    starts = range(0, len(stream) - sequence + 1, sequence)
    windows = (list(stream[start : start + sequence]) for start in starts)
    return [{"input_ids": ids, "labels": ids, "attention_mask": [1] * sequence} for ids in windows]


def _step_reporter(on_step: Callable[[int], None]) -> TrainerCallback:
    from transformers import TrainerCallback

    class StepReporter(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            on_step(state.global_step)

    return StepReporter()

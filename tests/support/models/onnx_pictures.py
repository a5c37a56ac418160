"""Tiny models that take images for the ONNX export's tests, and what transformers and a delivered folder's example write after a picture."""

from __future__ import annotations

import importlib.util
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, auto_model
from slipway.proof.pictures import Picture, make_picture
from support.models.gguf_models import save_tokenizer
from support.models.text_of_many import make_model

BEFORE, AFTER = [5, 6, 7], [8, 9]
"""Tokens before and after a picture."""


def save_pictured(model_type: str, folder: Path, **text: Any) -> Path:
    """Save a model of a type, with its tokenizer; ``text`` changes the configuration of its text part."""
    model = make_model(model_type)
    if text:
        config = model.config
        config.text_config = type(config.text_config)(**{**config.text_config.to_dict(), **text})
        torch.manual_seed(0)
        model = type(model)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.08))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def load_whole(folder: Path) -> Any:
    """Load the model of a folder with transformers."""
    loader = auto_model(DECODER, ModelConfig.read(folder))
    return loader.from_pretrained(folder, dtype=torch.float32).eval()


def picture_of(model: Any, *, seed: int, tokens: tuple[int, int] = (3, 5)) -> tuple[Picture, list[int]]:
    """Return a picture, and a prompt with it."""
    picture = make_picture(model.config, seed=seed, tokens=tokens)
    assert picture is not None
    with torch.no_grad():
        made = model.model.get_image_features(**as_tensors(picture), return_dict=True).pooler_output
    count = sum(each.reshape(-1, each.shape[-1]).shape[0] for each in made)
    return picture, [*BEFORE, *[picture.token] * count, *AFTER]


def as_tensors(picture: Picture) -> dict[str, torch.Tensor]:
    """Return the arguments of a picture."""
    return {name: torch.from_numpy(np.array(value)) for name, value in picture.arguments.items()}


def continue_by_transformers(model: Any, prompt: list[int], picture: Picture | None, count: int) -> list[int]:
    """Return the tokens that transformers writes greedily after a prompt."""
    ids = torch.tensor([prompt])
    given: dict[str, Any] = {}
    if picture is not None:
        given = as_tensors(picture)
        given |= {picture.types: (ids == picture.token).long()} if picture.types else {}
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **given, max_new_tokens=count, do_sample=False
    )
    return [int(token) for token in made[0, len(prompt) :]]


def continue_by_example(folder: Path, prompt: list[int], picture: Picture | None, count: int) -> list[int]:
    """Return the tokens that ``example.py`` of a folder writes."""
    example, graphs = _open_example(folder)
    arguments = dict(picture.arguments) if picture else {}
    tokens: list[int] = example.generate(prompt, arguments, graphs=graphs, max_new_tokens=count)
    return tokens


def logits_behind(folder: Path, prompt: list[int], picture: Picture) -> np.ndarray:
    """Return the logits of a prompt with a picture by the graphs of a folder, (tokens, vocabulary)."""
    example, graphs = _open_example(folder)
    arguments, decoder = dict(picture.arguments), graphs["model"]
    encoded = [graphs["vision_encoder"].run(call) for call in example.calls_of(arguments, graphs["vision_encoder"])]
    features = {name: np.concatenate([each[name] for each in encoded]) for name in encoded[0]}
    types = (np.array([prompt]) == picture.token).astype(np.int64)
    thrice = len(decoder.inputs["position_ids"].shape) == 3
    feed = graphs["embedding"].run({"input_ids": np.array([prompt]), **features})
    feed |= {"attention_mask": np.ones_like(types), **dict.fromkeys(example.TYPES, types)}
    feed["position_ids"] = example.positions_of(prompt, arguments, thrice=thrice)
    logits: np.ndarray = decoder.run({**feed, **decoder.zeros("past_key_values.", free=0)})["logits"][0]
    return logits


def _open_example(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the module ``example.py`` of a folder, and the folder's graphs."""
    specification = importlib.util.spec_from_file_location("delivered_example", folder / "example.py")
    assert specification is not None
    assert specification.loader is not None
    example: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    names = ("vision_encoder", "embedding", "model")
    return example, {name: example.Graph(f"{name}.onnx", ["CPUExecutionProvider"]) for name in names}


def continue_by_genai(genai: Any, runtime: Any, prompt: list[int], picture: Picture, count: int) -> list[int]:
    """Return the tokens that onnxruntime-genai writes; ``runtime`` is its model of a delivered folder."""
    params = genai.GeneratorParams(runtime)
    params.set_search_options(max_length=len(prompt) + count, batch_size=1)
    generator, given = genai.Generator(runtime, params), genai.NamedTensors()
    given["input_ids"] = np.array([prompt], np.int32)
    given["num_image_tokens"] = np.array([prompt.count(picture.token)], np.int64)
    for name, value in picture.arguments.items():
        given[name] = np.ascontiguousarray(value)
    generator.set_inputs(given)
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)][len(prompt) :]


def write_png(path: Path, pixels: np.ndarray) -> Path:
    """Write an image file. pixels: (height, width, 3), bytes."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    return path


def until_end(tokens: list[int], folder: Path) -> list[int]:
    """Return the tokens before the first that ends a text."""
    config = json.loads((folder / "config.json").read_text())
    ends = config.get("eos_token_id") or config["text_config"].get("eos_token_id")
    stop = next((index for index, token in enumerate(tokens) if token in np.atleast_1d(ends)), len(tokens))
    return tokens[:stop]


def change_graph(path: Path, change: Callable[[ir.Model], None]) -> None:
    """Change a graph's file in place; its data stays."""
    model = ir.load(path)
    change(model)
    ir.save(model, path)


def replace_input(model: ir.Model, name: str, make: Callable[[ir.Value], list[ir.Node]]) -> None:
    """Make the nodes of a graph read what ``make`` makes of an input."""
    value = next(each for each in model.graph.inputs if each.name == name)
    readers = [(use.node, use.idx) for use in value.uses()]
    nodes = make(value)
    for node, index in readers:
        node.replace_input_with(index, nodes[-1].outputs[0])
    model.graph.insert_before(model.graph[0], nodes)


def constant(model: ir.Model, name: str, values: list[int]) -> ir.Value:
    """Add integers to a graph."""
    tensor = ir.tensor(np.array(values, np.int64), name=name)
    made = ir.Value(name=name, const_value=tensor, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(tensor.shape))
    model.graph.register_initializer(made)
    return made

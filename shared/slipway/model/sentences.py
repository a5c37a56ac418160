"""Find the files of sentence-transformers beside a model, read from them how it makes one vector of a text, and make it.

Axes: B = batch, S = tokens, H = width of a token's vector.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from slipway.errors import ModelExportError
from slipway.files.json_documents import read_json, read_json_object, read_object_or_empty
from slipway.files.paths import file_in
from slipway.model.dtypes import FLOATS
from slipway.model.safetensors_file import read_safetensors
from slipway.texts import printable

MODULES = "modules.json"
SENTENCE_SETTINGS = "config_sentence_transformers.json"
_SETTINGS = (SENTENCE_SETTINGS, "sentence_bert_config.json")
MODULE_WEIGHTS, MODULE_PICKLE = "model.safetensors", "pytorch_model.bin"
_MODULE_FILES = ("config.json", MODULE_WEIGHTS, MODULE_PICKLE)
_WITHOUT_FILES = ("Normalize",)
"""Modules that need no file of their own."""
_LANGUAGE_HEAD = re.compile(r"(ForMaskedLM|ForCausalLM|LMHeadModel)$")
MODULE_FOLDER = re.compile(r"\w[\w.-]{0,99}")
_MOST_MODULES = 20
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Modes by their settings before version 5.5, in the order in which their vectors are joined."""

_WEIGHT, _BIAS = "linear.weight", "linear.bias"
_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "Identity": lambda values: values,
    "Tanh": lambda values: values.tanh(),
}
"""By the name of torch's class; Tanh is what sentence-transformers takes where a file names none."""

SENTENCE_EMBEDDING = "sentence_embedding"
"""Name of the vector in sentence-transformers, and of the output of a graph."""


class UnknownPoolingError(Exception):
    """The files say that the model makes one vector of a text in a way that is not known here; the message says what."""


def sentence_files(folder: Path) -> list[Path]:
    """Return the files that make a model a sentence encoder: the list of modules, settings, and the modules' own files.

    Raises:
        ArtifactError: As :func:`slipway.files.paths.file_in`.
    """
    if file_in(folder, MODULES) is None:
        return []
    places = [f"{path}/{name}" for _, path in _places(folder) for name in _MODULE_FILES]
    files = [folder / name for name in (MODULES, *_SETTINGS, *places) if file_in(folder, name) is not None]
    # A pickle beside the same weights as safetensors is not read, so it does not travel.
    return [path for path in files if path.name != MODULE_PICKLE or path.with_name(MODULE_WEIGHTS) not in files]


def pickled_modules(folder: Path) -> list[Path]:
    """Return the files of pickled weights of a sentence encoder's modules, which are converted before they are used."""
    return [path for path in sentence_files(folder) if path.name == MODULE_PICKLE]


def module_files(encoder: Path, base: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the files that make a model a sentence encoder, by name, and the modules whose files are in neither folder.

    Args:
        encoder: The folder whose list of modules counts.
        base: The folder that has the modules which that one lacks, as a checkpoint that peft alone saved does.
    """
    chosen = {path.relative_to(encoder).as_posix(): path for path in sentence_files(encoder)}
    missing = []
    for kind, place in _places(encoder):
        if any(name.startswith(f"{place}/") for name in chosen):
            continue
        others = [f"{place}/{name}" for name in _MODULE_FILES if file_in(base, f"{place}/{name}") is not None]
        chosen |= {name: base / name for name in others}
        if not others and kind not in _WITHOUT_FILES:
            missing.append(place)
    return chosen, missing


def _places(folder: Path) -> list[tuple[str, str]]:
    """Return class name and folder of each module that has a folder; none of a list that cannot be read."""
    try:
        return [(kind, path) for kind, path in _modules(folder) if MODULE_FOLDER.fullmatch(path)]
    except UnknownPoolingError:
        return []


def read_pooling(*folders: Path | None) -> Pooling | None:
    """Return how a sentence encoder makes one vector of a text; None if no folder has the list of modules.

    Args:
        folders: The folders to look into; the first with a list of modules decides.

    Raises:
        UnknownPoolingError: The files are not readable, or name something else than a pooling of token vectors, scaled or not.
    """
    there = [each for each in folders if each is not None]
    folder = next((each for each in there if (each / MODULES).is_file()), None)
    if folder is None:
        return None
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds[:1] != ["Transformer"] or modules[0][1]:
        raise UnknownPoolingError(f"{MODULES} does not begin with a transformer in the folder itself")
    normalized = kinds[-1] == "Normalize"
    between = kinds[2:-1] if normalized else kinds[2:]
    if kinds[1:2] != ["Pooling"] or any(kind != "Dense" for kind in between):
        known = ("Pooling", "Dense", "Normalize")
        odd = next((kind for kind in kinds[1:] if kind not in known), "another order of modules")
        raise UnknownPoolingError(f"{MODULES} has {odd}, and only Pooling, then Dense, and then Normalize are known")
    homes = {place: _home_of(place, [folder, *there]) for _, place in modules}
    for kind, place in modules[2:]:
        settings = _settings(homes[place], place)
        names = (settings.get(key) for key in ("module_input_name", "module_output_name"))
        if any(name not in (None, SENTENCE_EMBEDDING) for name in names):
            raise UnknownPoolingError(f"{kind} is applied to something else than the sentence embedding")
    modes = _modes(_settings(homes[modules[1][1]], modules[1][1]))
    layers = tuple(_read_dense(homes[place], place) for kind, place in modules if kind == "Dense")
    given = _hidden_size(there) * len(modes)
    for number, layer in enumerate(layers):
        given = layers[number - 1].outputs if number else given
        if given and given != layer.inputs:
            raise UnknownPoolingError(f"a Dense takes {layer.inputs} values, and gets {given}")
    return Pooling(modes, normalized, layers)


def _home_of(place: str, folders: Sequence[Path]) -> Path:
    """Return the first folder that has files of a module: a checkpoint that peft alone saved has the list, and the base its modules."""
    return next(
        (each for each in folders if any((each / place / name).is_file() for name in _MODULE_FILES)), folders[0]
    )


def _hidden_size(folders: Iterable[Path]) -> int:
    """Return the width of a token's vector as the first ``config.json`` that is there says; 0 if none does."""
    for folder in folders:
        size = read_object_or_empty(folder / "config.json").get("hidden_size")
        if isinstance(size, int) and not isinstance(size, bool):
            return size
    return 0


def load_pooling(*folders: Path | None) -> Pooling | None:
    """Return the same, with the weights of its layers in memory. Imports torch where there are any.

    Raises:
        UnknownPoolingError: As :func:`read_pooling`.
    """
    pooling = read_pooling(*folders)
    return pooling.load() if pooling else None


def drop_language_head(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the configuration of a model with the class that is used: that of a sentence encoder has no language head.

    sentence-transformers loads the base model of whatever class ``config.json`` names (``MPNetForMaskedLM``, ``Qwen3ForCausalLM``), and
    saves it under that name.
    """
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or not _LANGUAGE_HEAD.search(name) or not is_sentence_encoder(folder):
        return config
    return {**config, "architectures": [_LANGUAGE_HEAD.sub("Model", name)]}


def is_sentence_encoder(folder: Path) -> bool:
    """Return whether the files say that a folder's model gives vectors of tokens, which are pooled. Reranking and sparse models do not."""
    if not (folder / MODULES).is_file():
        return False
    try:
        return [kind for kind, _ in _modules(folder)][:2] == ["Transformer", "Pooling"]
    except UnknownPoolingError:
        return False


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return class name and folder of each module, in order."""
    try:
        listed = read_json(folder / MODULES, lenient=True)
    except (OSError, ValueError) as error:
        raise UnknownPoolingError(f"{MODULES} cannot be read ({error})") from error
    if not isinstance(listed, list) or len(listed) > _MOST_MODULES:
        raise UnknownPoolingError(f"{MODULES} is not a list of modules")
    return [_module(each) for each in listed]


def _module(listed: Any) -> tuple[str, str]:
    kind, path = (listed.get(key) if isinstance(listed, dict) else None for key in ("type", "path"))
    if not isinstance(kind, str) or not isinstance(path, str):
        raise UnknownPoolingError(f"{MODULES} has a module without type and path")
    if path and not MODULE_FOLDER.fullmatch(path):
        raise UnknownPoolingError(
            f"{MODULES} has a module in {printable(path)[:100]!r}, which is not a folder beside it"
        )
    own = kind.startswith("sentence_transformers.")
    return (kind.rpartition(".")[2] if own else printable(kind)[:100]), path


def _settings(folder: Path, path: str) -> dict[str, Any]:
    file = folder / path / "config.json"
    try:
        return read_json_object(file, lenient=True) if path and file.is_file() else {}
    except (OSError, ValueError) as error:
        raise UnknownPoolingError(f"{path}/config.json cannot be read ({error})") from error


def _modes(settings: dict[str, Any]) -> tuple[str, ...]:
    named = settings.get("pooling_mode")
    if named is None:
        named = [mode for switch, mode in _SWITCHES.items() if settings.get(switch) is True] or ["mean"]
    modes = [named] if isinstance(named, str) else named
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) and mode in MODES for mode in modes):
        raise UnknownPoolingError(f"the pooling {printable(str(named))[:100]} is not known")
    if settings.get("include_prompt", True) is not True:
        raise UnknownPoolingError("the pooling leaves the tokens of a prompt out, which a graph cannot know")
    return tuple(modes)


def _read_dense(folder: Path, place: str) -> Dense:
    """Return a layer behind the pooling from its folder: its settings, and the shapes of its weights."""
    settings, file = _settings(folder, place), folder / place / MODULE_WEIGHTS
    activation = str(settings.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise UnknownPoolingError(f"the activation {printable(activation)[:100]} of {place} is not known")
    if settings.get("use_residual"):  # from sentence-transformers 5.7 on
        raise UnknownPoolingError(f"{place} adds its inputs to its results")
    try:
        tensors = read_safetensors(file).tensors
    except ModelExportError as error:
        raise UnknownPoolingError(f"the weights of {place} cannot be read ({error.message})") from error
    weight, bias = tensors.get(_WEIGHT), tensors.get(_BIAS)
    if bias is None and settings.get("bias") is True:
        raise UnknownPoolingError(f"{place}/{MODULE_WEIGHTS} lacks the bias that its settings name")
    fits = weight is not None and len(weight.shape) == 2 and min(weight.shape) > 0 and weight.dtype in FLOATS
    if not fits or weight is None or (bias is not None and bias.shape != weight.shape[:1]):
        raise UnknownPoolingError(f"{place}/{MODULE_WEIGHTS} does not have the weights of a linear layer")
    return Dense(file, weight.shape[1], weight.shape[0], activation)


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer behind the pooling (EmbeddingGemma has two).

    Attributes:
        file: Its weights.
        inputs: Values that it takes.
        outputs: Values that it gives.
        activation: Name of the function of its results, one of torch's classes.
        weights: Its weights by name, once they are loaded.
    """

    file: Path
    inputs: int
    outputs: int
    activation: str

    weights: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def load(self) -> Self:
        """Return the layer with its weights in memory, in float32: a traced model reads no files."""
        from safetensors.torch import load_file

        return replace(self, weights={name: tensor.float() for name, tensor in load_file(self.file).items()})

    def compute(self, vectors: Any) -> Any:
        """Return the results of a layer that is loaded. (B, inputs) → (B, outputs)."""
        weight, bias = self.weights[_WEIGHT].to(vectors), self.weights.get(_BIAS)
        made = vectors @ weight.T
        return _ACTIVATIONS[self.activation](made if bias is None else made + bias.to(vectors))


@dataclass(frozen=True, slots=True)
class Pooling:
    """How token vectors become one vector.

    Attributes:
        modes: Keys of :data:`MODES`; the vectors of several are joined in this order.
        normalized: Whether the vector gets the length 1.
        layers: Linear layers between the two.
    """

    modes: tuple[str, ...]
    normalized: bool
    layers: tuple[Dense, ...] = ()

    def load(self) -> Self:
        """Return the pooling with the weights of its layers in memory, as :func:`pool` needs them."""
        return replace(self, layers=tuple(layer.load() for layer in self.layers))

    def width(self, hidden: int) -> int:
        """Return the size of the vector, from that of a token's."""
        return self.layers[-1].outputs if self.layers else hidden * len(self.modes)


def _first(hidden: Any, mask: Any) -> Any:
    return (hidden * mask * (mask.cumsum(1) == 1)).sum(1)


def _last(hidden: Any, mask: Any) -> Any:
    return (hidden * mask * (mask.cumsum(1) == mask.sum(1, keepdim=True))).sum(1)


def _largest(hidden: Any, mask: Any) -> Any:
    return hidden.masked_fill(mask == 0, float("-inf")).amax(1)


def _mean(hidden: Any, mask: Any) -> Any:
    return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


def _mean_by_root(hidden: Any, mask: Any) -> Any:
    return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9).sqrt()


def _weighted_mean(hidden: Any, mask: Any) -> Any:
    return _mean(hidden, mask * mask.cumsum(1))


MODES: Mapping[str, Callable[[Any, Any], Any]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
"""Functions from token vectors (B, S, H) and a mask (B, S, 1) to vectors (B, H), by sentence-transformers' names."""


def pool(hidden: Any, mask: Any, pooling: Pooling) -> Any:
    """Return the vector of each text, (B, width of the pooling), by a pooling that is loaded. hidden: (B, S, H); mask: (B, S), 1 for a token and 0 for padding."""
    import torch

    weights = mask.unsqueeze(-1).to(hidden.dtype)
    made = torch.cat([MODES[mode](hidden, weights) for mode in pooling.modes], dim=-1)
    for layer in pooling.layers:
        made = layer.compute(made)
    return made / made.norm(p=2, dim=-1, keepdim=True).clamp(min=1e-12) if pooling.normalized else made

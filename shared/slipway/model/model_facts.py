"""Facts that only a model's own code knows, from transformers without loading weights (the model is built on ``meta``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipway.machine.absent_parts import leave_out_absent_parts
from slipway.model.base_format import NAME_ITS_KIND
from slipway.model.folder import ModelFolder
from slipway.model.safetensors_file import TensorInfo
from slipway.texts import quoted

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_BESIDE_WEIGHTS = 1 << 26
"""Values of a model that need not be stored, such as the head that it was trained without; 256 MiB in float32."""
_LENGTHS = ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len")
_UNBOUNDED = 1 << 20
_UNPACKED = ("F64", "F32", "F16", "BF16")
_SMALLEST_BITS = 2
"""Fewest bits of a value in a packed weight."""


class CannotBuildError(Exception):
    """Transformers cannot build a model: its code is unknown or custom, or its configuration is wrong."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model class with a given configuration, under the model's own names.

    Attributes:
        tied: Parameter → the parameter whose storage it shares.
        transposed: Weights stored as (in, out): those of transformers' ``Conv1D``.
        shapes: Shape of every parameter.
        model: The model itself, all of it on ``meta``.
    """

    tied: Mapping[str, str]
    transposed: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]
    model: PreTrainedModel = field(repr=False, compare=False)

    def groups(self) -> list[list[str]]:
        """Return names that share one storage, each group sorted with the source first."""
        groups: dict[str, list[str]] = {}
        for target, source in sorted(self.tied.items()):
            groups.setdefault(source, [source]).append(target)
        return [groups[source] for source in sorted(groups)]


def model_facts(folder: ModelFolder) -> ModelFacts:
    """Return facts about the model in a folder. No weights are read; imports torch and transformers.

    Raises:
        CannotBuildError: With the cause in one line.
    """

    def read() -> PretrainedConfig:
        import transformers

        _kind(folder.config)
        config = transformers.AutoConfig.from_pretrained(folder.path, trust_remote_code=False)
        config.architectures = folder.config.get("architectures")
        return config

    return _facts(read)


def model_facts_of(config: Mapping[str, Any]) -> ModelFacts:
    """Return facts about the model with this ``config.json``, as :func:`model_facts`.

    Raises:
        CannotBuildError: With the cause in one line.
    """
    return _facts(lambda: configuration_of(config))


def configuration_of(config: Mapping[str, Any]) -> PretrainedConfig:
    """Return transformers' configuration for the content of a ``config.json``, which names its ``model_type``."""
    import transformers

    kind = _kind(config)
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"it has no models of type {quoted(kind)}")
    return transformers.CONFIG_MAPPING[kind].from_dict(dict(config))


def _kind(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ValueError("its config.json names no model_type")
    return kind


def remedy_of(config: Mapping[str, Any]) -> str:
    """Return what a user can do about a model that transformers cannot build."""
    if config.get("model_type"):
        return "use a base model that transformers knows without custom code"
    return NAME_ITS_KIND


def _facts(read: Callable[[], PretrainedConfig]) -> ModelFacts:
    import torch
    from transformers.pytorch_utils import Conv1D

    try:
        config = read()
        with torch.device("meta"):
            model = _class_of(config)._from_config(config)
        tied = dict(model.all_tied_weights_keys)  # fails for a class that is not a PreTrainedModel
    except Exception as error:  # the model's own code may raise anything
        said = str(error).strip() or type(error).__name__
        raise CannotBuildError(said.splitlines()[0][:300]) from error
    named = model.named_parameters(remove_duplicate=False)
    conv1d = [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Conv1D)]
    return ModelFacts(
        tied=tied,
        transposed=frozenset(conv1d),
        shapes={path: tuple(parameter.shape) for path, parameter in named},
        model=model,
    )


def check_loadable(folder: ModelFolder, model_class: Any, *, config: Mapping[str, Any] | None = None) -> None:
    """Make sure that a model has about as many values as are stored, before transformers makes room for all of them.

    Whatever ``config.json`` describes and no file has is made at random when the model is loaded.

    Args:
        folder: The model; a configuration with a few more digits describes one of any size.
        model_class: Class of transformers that will load it.
        config: Its configuration, if it is not that of its folder.

    Raises:
        CannotBuildError: What is in the way, in one line.
        CheckpointValidationError: As :func:`slipway.model.safetensors_file.read_weights`.
    """
    import torch
    import transformers

    stored = sum(map(_most_values, folder.tensors.values()))
    try:
        auto = transformers.AutoConfig
        settings = configuration_of(config) if config else auto.from_pretrained(folder.path, trust_remote_code=False)
        make = getattr(model_class, "from_config", None) or model_class._from_config
        with torch.device("meta"):
            model = make(settings)
    except Exception as error:  # as in model_facts
        said = str(error).strip() or type(error).__name__
        raise CannotBuildError(said.splitlines()[0][:300]) from error
    described = sum(value.numel() for values in (model.parameters(), model.buffers()) for value in values)
    if described > stored + _BESIDE_WEIGHTS:
        raise CannotBuildError(
            f"its config.json describes a model of {described} values, and its files have {stored} at most"
        )


def most_tokens(model: PreTrainedModel) -> int:
    """Return the most tokens that a model takes; RoBERTa and its kin count positions from behind the padding token."""
    config = model.config.get_text_config()
    lengths = (getattr(config, name, None) for name in _LENGTHS)
    longest = min((size for size in lengths if isinstance(size, int) and size > 0), default=_UNBOUNDED)
    learned = next((each for name, each in model.named_modules() if name.endswith("position_embeddings")), None)
    offset = getattr(learned, "padding_idx", None)
    return longest if offset is None else longest - int(offset) - 1


def _most_values(tensor: TensorInfo) -> int:
    """Return the most values that a stored tensor may hold: more than it has elements if it is packed."""
    return tensor.numel if tensor.dtype in _UNPACKED else 8 * tensor.nbytes // _SMALLEST_BITS


def named_class(name: str) -> Any:
    """Return transformers' class of a model by its name; None if it has none.

    Its base class does not count: an instance would store its own properties on that class, and all classes of this process would inherit them.
    """
    import transformers

    leave_out_absent_parts()
    model_class = getattr(transformers, name, None)
    return model_class if getattr(model_class, "config_class", None) is not None else None


def _class_of(config: PretrainedConfig) -> Any:
    if not config.architectures:
        raise ValueError("its config.json names no class (architectures)")
    name = config.architectures[0]
    model_class = named_class(name)
    if model_class is None:
        raise ValueError(f"transformers has no class of a model named {name}")
    return model_class

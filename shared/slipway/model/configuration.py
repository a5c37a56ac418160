"""A model's ``config.json`` and special tokens, and what follows from them.

The file is read within limits. Importing this module imports neither torch nor transformers.

Up to version 4 transformers wrote the settings of generation into ``config.json``. Version 5 writes them, a decoder's first token
among them, into ``generation_config.json``, and its classes of configurations lack those that they do not compute with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from slipway.errors import CheckpointValidationError
from slipway.files.json_documents import read_json
from slipway.model import families
from slipway.model.families import Family
from slipway.model.limits import model_excess
from slipway.model.model_files import CONFIG, GENERATION_CONFIG
from slipway.model.sentences import drop_language_head
from slipway.texts import printable

_FIRST_TOKENS = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
"""Settings for the first token of a decoder; the first of them that is set decides."""
NO_FIRST_TOKEN = (
    f"neither {GENERATION_CONFIG} nor config.json names a first token for the decoder: set {_FIRST_TOKENS[0]}"
)


class ModelConfig(Mapping[str, Any]):
    """The settings of a ``config.json``, by name, and what they say of the model. It does not change.

    Args:
        settings: Content of the file.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the ``config.json`` of a model that a machine can build, with the class of a sentence encoder that is used.

        Raises:
            CheckpointValidationError: ``BASE_MODEL_INVALID``.
        """
        path = folder / CONFIG
        try:
            settings = read_json(path, lenient=True)
        except OSError as error:
            what = f"{path} cannot be read ({error.strerror or error})"
        except ValueError as error:
            what = f"{path} is not JSON ({error})"
        else:
            if isinstance(settings, dict):
                excess = model_excess(settings)
                if not excess:
                    return cls(drop_language_head(settings, folder))
                what = f"{path} has {excess}"
            else:
                what = f"{path} is not a JSON object"
        raise CheckpointValidationError(
            what, reason="BASE_MODEL_INVALID", remedy="download or copy the base model again", about={"file": path}
        )

    def __getitem__(self, name: str) -> Any:
        return self._settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def with_changes(self, settings: Mapping[str, Any]) -> Self:
        """Return the configuration with other values of some settings."""
        return type(self)({**self._settings, **settings})

    @cached_property
    def family(self) -> Family | None:
        """The model's family; None where it is not known."""
        return families.family_of(self)

    @property
    def description(self) -> str:
        """What the model is, for a message: ``encoder-decoder (MarianMTModel)``, or its class or type where the family is not known."""
        name = printable(str(self.class_name or self.get("model_type") or "no class and no type"))[:100]
        return f"{self.family.name} ({name})" if self.family else name

    @property
    def class_name(self) -> str:
        """The class that the configuration names first; empty if it names none."""
        architectures = self.get("architectures")
        named = architectures[0] if isinstance(architectures, list) and architectures else ""
        return str(named or "")

    @property
    def class_and_type(self) -> str:
        """Class and type in a few words, to tell kinds of models apart; empty if the configuration names neither."""
        return printable(" ".join(str(part)[:100] for part in (self.class_name, self.get("model_type") or "") if part))

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The settings of the model's text part, which are its own unless it has several parts."""
        text = self.get("text_config")
        return text if isinstance(text, dict) else self

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens that the text part knows; None if the configuration does not say so."""
        for part in (self, self.text):
            if isinstance(size := part.get("vocab_size"), int):
                return size
        return None

    @property
    def quantization(self) -> dict[str, Any]:
        """The ``quantization_config`` (older files of compressed-tensors call it ``compression_config``); empty if there is none."""
        for part in (self, self.text):
            settings = part.get("quantization_config") or part.get("compression_config")
            if isinstance(settings, dict):
                # Old files of bitsandbytes do not name their method.
                legacy = settings.get("load_in_4bit") or settings.get("load_in_8bit")
                return ({"quant_method": "bitsandbytes"} if legacy else {}) | settings
        return {}

    @property
    def has_several_labels(self) -> bool:
        """Whether a classifier judges each label alone, so that a text may have several."""
        return bool(self.get("problem_type") == "multi_label_classification")

    @property
    def padding(self) -> int:
        """The token of places without one, by which RoBERTa and its kin count positions; 0 if the configuration names none that the model knows."""
        token, tokens = self.get("pad_token_id"), self.get("vocab_size")
        return token if isinstance(token, int) and isinstance(tokens, int) and 0 <= token < tokens else 0

    @property
    def takes_more_than_text(self) -> bool:
        """Whether the model, or one that it is part of, takes images or sound."""
        return families.takes_more_than_text(self)

    @property
    def keeps_states(self) -> bool:
        """Whether a decoder has layers that keep a state beside, or instead of, keys and values of attention."""
        return any(families.keeps_states(part) for part in (self, self.text))

    @property
    def mixes_experts(self) -> bool:
        """Whether the model has layers of several experts, of which each token takes a few."""
        return any(families.mixes_experts(part) for part in (self, self.text))

    def of_type(self, model_type: str) -> Self:
        """Return the configuration with the kind of model that a user names, and the bare class of that kind if it names no class.

        Imports transformers if a kind is given.

        Args:
            model_type: The setting ``base_model.model_type``; empty leaves the configuration as it is.

        Raises:
            CheckpointValidationError: ``BASE_MODEL_INVALID``: the configuration names another kind.
        """
        if not model_type:
            return self
        named = self.get("model_type")
        if named not in (None, "", model_type):
            raise CheckpointValidationError(
                f"the base model is a {named!r} by its config.json, and base_model.model_type is {model_type!r}",
                reason="BASE_MODEL_INVALID",
                remedy="leave base_model.model_type out",
                about={"model_type": named},
            )
        config = self.with_changes({"model_type": model_type})
        bare = "" if self.get("architectures") else families.class_name(families.FEATURE_EXTRACTION, config)
        return config.with_changes({"architectures": [bare]}) if bare else config

    def why_no_text_graph(self, product: str) -> str:
        """Return why this model cannot be one graph that takes a text; empty if it can.

        Experts, and layers that keep a state, have no place in such a graph.

        Args:
            product: Name of the graph in its format, such as ``ExecuTorch program``.
        """
        what = f"the model is of the kind {self.description}"
        if self.family not in families.TEXT_FAMILIES or self.takes_more_than_text:
            alternative = "; ONNX takes it" if self.family in families.PAIRS else ""
            return f"{what}, and {product}s are made of text decoders and encoders only{alternative}"
        if self.keeps_states:
            return f"{what} with layers that keep a state, of which no {product} is made"
        if self.mixes_experts:
            return f"{what} with a mixture of experts, of which no {product} is made"
        return ""


def first_token(settings: Mapping[str, Any]) -> int | None:
    """Return a decoder's first token; None if no setting names one."""
    return next((settings[name] for name in _FIRST_TOKENS if _is_token(settings.get(name))), None)


def token_of(config: Any, name: str) -> int | None:
    """Return a special token of transformers' configuration object; None if it has none, or several.

    A configuration of several parts keeps it in that of its text.
    """
    value = getattr(config, name, None)
    if value is None:
        value = getattr(config.get_text_config(), name, None)
    return value if _is_token(value) else None


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

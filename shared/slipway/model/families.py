"""Tell the family of a model from its ``config.json``: its class in transformers, its inputs and outputs, and how two models compare.

Everything that loads, runs or judges a model asks here, so no stage assumes a decoder. A model that no family fits has none: then
a stage refuses, or reports *not run*, by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slipway.machine.absent_parts import leave_out_absent_parts


class Comparison(StrEnum):
    """How two models of a family are compared."""

    NEXT_TOKEN = "next token"  # noqa: S105 - of a text, not of access
    TEACHER_FORCED = "teacher forced"
    CLASSES = "classes"
    SPANS = "spans"
    MASKED_TOKENS = "masked tokens"
    EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model.

    Attributes:
        name: For people.
        auto_class: The class of transformers that loads it.
        inputs: Names of the tensors it takes.
        outputs: Names of the tensors it gives that are compared.
        comparison: How two models are compared.
        task: Name of its task on model hubs (``pipeline_tag``).
        generates: Whether it decodes text token by token, with a KV cache.
        unused: Beginnings of the names of parameters that the outputs do not depend on, and that need not be stored.
    """

    name: str
    auto_class: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    comparison: Comparison
    task: str
    generates: bool = False
    unused: tuple[str, ...] = ()

    @property
    def counts_labels(self) -> bool:
        """Whether the size of its results is a number of labels."""
        return self.comparison is Comparison.CLASSES

    @property
    def takes_sound(self) -> bool:
        """Whether the encoder reads sound."""
        return self.inputs[0] in _SOUND


_SOUND = ("input_features", "input_values")
"""Names of sound: frames that a feature extractor makes of it, and its samples themselves."""
_TEXT = ("input_ids", "attention_mask")
_DECODED = ("decoder_input_ids",)

DECODER = Family(
    "decoder", "AutoModelForCausalLM", _TEXT, ("logits",), Comparison.NEXT_TOKEN, "text-generation", generates=True
)
ENCODER_DECODER = Family(
    "encoder-decoder",
    "AutoModelForSeq2SeqLM",
    (*_TEXT, *_DECODED),
    ("logits",),
    Comparison.TEACHER_FORCED,
    "text2text-generation",
    generates=True,
)
SPEECH = Family(
    "speech encoder-decoder",
    "AutoModelForSpeechSeq2Seq",
    ("input_features", *_DECODED),
    ("logits",),
    Comparison.TEACHER_FORCED,
    "automatic-speech-recognition",
    generates=True,
)
RAW_SPEECH = Family(
    "raw speech encoder-decoder",
    "AutoModelForSpeechSeq2Seq",
    ("input_values", *_DECODED),
    ("logits",),
    Comparison.TEACHER_FORCED,
    "automatic-speech-recognition",
    generates=True,
)
"""Speech models whose encoder takes the samples of sound, of any number."""
SEQUENCE_CLASSIFIER = Family(
    "sequence classifier",
    "AutoModelForSequenceClassification",
    _TEXT,
    ("logits",),
    Comparison.CLASSES,
    "text-classification",
)
TOKEN_CLASSIFIER = Family(
    "token classifier",
    "AutoModelForTokenClassification",
    _TEXT,
    ("logits",),
    Comparison.CLASSES,
    "token-classification",
)
QUESTION_ANSWERING = Family(
    "question answering",
    "AutoModelForQuestionAnswering",
    _TEXT,
    ("start_logits", "end_logits"),
    Comparison.SPANS,
    "question-answering",
)
MASKED_LANGUAGE_MODEL = Family(
    "masked language model", "AutoModelForMaskedLM", _TEXT, ("logits",), Comparison.MASKED_TOKENS, "fill-mask"
)
FEATURE_EXTRACTION = Family(
    "feature extraction",
    "AutoModel",
    _TEXT,
    ("last_hidden_state",),
    Comparison.EMBEDDINGS,
    "feature-extraction",
    unused=("pooler.",),
)

SHORTEST_SOUND = 1000
"""Samples of the shortest sound for a model of samples; Moonshine's convolutions need 895."""
PAIRS = (ENCODER_DECODER, SPEECH, RAW_SPEECH)
"""Families of an encoder and a decoder."""
TEXT_FAMILIES = (
    DECODER,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    QUESTION_ANSWERING,
    MASKED_LANGUAGE_MODEL,
    FEATURE_EXTRACTION,
)
"""Families of models that can be one graph that takes a text."""
FAMILIES: tuple[Family, ...] = (
    DECODER,
    ENCODER_DECODER,
    SPEECH,
    RAW_SPEECH,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    QUESTION_ANSWERING,
    MASKED_LANGUAGE_MODEL,
    FEATURE_EXTRACTION,
)

TRAINED_FAMILIES = {
    "SEQ_CLS": SEQUENCE_CLASSIFIER,
    "TOKEN_CLS": TOKEN_CLASSIFIER,
    "QUESTION_ANS": QUESTION_ANSWERING,
}
"""Families whose head a training adds to a base without one, by peft's ``task_type``."""

_ENDINGS = (
    (re.compile(r"(ForCausalLM|(?<!With)LMHeadModel|ModelWithLMHead)$"), DECODER),
    (re.compile(r"(ForConditionalGeneration|MTModel)$"), ENCODER_DECODER),
    (re.compile(r"ForSequenceClassification$"), SEQUENCE_CLASSIFIER),
    (re.compile(r"ForTokenClassification$"), TOKEN_CLASSIFIER),
    (re.compile(r"^(?!XLNet).*ForQuestionAnswering$|ForQuestionAnsweringSimple$"), QUESTION_ANSWERING),
    (re.compile(r"ForMaskedLM$"), MASKED_LANGUAGE_MODEL),
    # A class with parts of its own, as GPT2DoubleHeadsModel or T5EncoderModel, is not what AutoModel loads.
    (re.compile(r"^(?!.*(Heads?|Encoder|Decoder|For|With)).*Model$"), FEATURE_EXTRACTION),
)
_OTHER_SENSES = re.compile(r"audio|speech|voice|vision|transcribe|realtime|_asr|_tts|^sam")
"""Matches types of models that take images or sound."""
_SPEECH_TYPES = {**dict.fromkeys(("whisper", "speech_to_text"), SPEECH), "moonshine": RAW_SPEECH}
_CAUSAL, _WITH_IMAGES, _WITH_SOUND = "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"
_TEXT_OF_MANY_TYPES = {
    **dict.fromkeys(("gemma3", "gemma3n", "gemma4", "gemma4_unified"), _CAUSAL),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _WITH_IMAGES),
    **dict.fromkeys(("mistral3", "llama4", "mllama", "lfm2_vl", "glm4v", "aya_vision"), _WITH_IMAGES),
    **dict.fromkeys(("qwen3_asr", "voxtral"), _WITH_SOUND),
    **dict.fromkeys(("internvl", "smolvlm", "idefics3", "llava", "llava_next", "llava_onevision"), _WITH_IMAGES),
}
"""Decoders that take images or sound too, and generate text from text alone as well: the class of transformers that loads each whole.

AutoModelForCausalLM would take only the text part of some (Qwen3.5, Llama 4), and refuses others. A type is here once a test has run it on text.
"""
_TASKS_WITH_SOUND = {"qwen3_asr": "automatic-speech-recognition", "voxtral": "audio-text-to-text"}
"""Tasks of decoders that take sound, by type of model; a model that takes images too has the task of its family."""
_DECODER_TYPES = (
    *("bloom", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj"),
    *("granite", "llama", "mistral", "mixtral", "mpt", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
)
"""Model types that are decoders where a configuration names no class."""
_SEQUENCE_TO_SEQUENCE_TYPES = ("bart", "led", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "umt5")
_OTHER_INPUTS = (
    *("vision_config", "audio_config", "image_size", "patch_size", "num_channels", "visual_embedding_dim"),
    *("num_mel_bins", "feat_extract_norm", "feature_projection_input_dim", "sampling_rate", "input_feat_per_channel"),
    *("max_2d_position_embeddings", "d_latents", "max_xpath_tag_unit_embeddings"),
)
"""Settings of a configuration that only a model of images, sound, pages or bytes has."""
_OTHER_TYPES = (
    *("blip", "bros", "canary", "chameleon", "cohere_asr", "decision_transformer", "evolla", "flaubert", "imagegpt"),
    *("kyutai_speech_to_text", "luke", "lxmert", "mistral4", "moonshine_streaming", "moshi", "pop2piano"),
    *("tapas", "tvp", "xlm"),
)
"""Types that look like models of text, and are of another class, take more, or give something else."""

_STATES = (
    *(
        "state_size",
        "ssm_state_size",
        "ssm_cfg",
        "mamba_d_state",
        "conv_L_cache",
        "lru_width",
        "linear_conv_kernel_dim",
    ),
    *("rescale_every", "slstm_at", "inference_state_dtype", "number_of_conv_states"),
)
"""Settings of a decoder that keeps states beside, or instead of, keys and values of attention."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Settings with the number of experts of a mixture."""
_STATE_LAYERS = ("conv", "hybrid", "linear_attention", "mamba", "recurrent")


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family of the model with this ``config.json``; None where it is not known.

    The class that the configuration names decides. Where it names none, the model's type does, if that leaves no doubt.
    """
    architectures, model_type = config.get("architectures"), config.get("model_type")
    if not architectures:
        return _family_of_type(config, model_type)
    name = architectures[0] if isinstance(architectures, list) else None
    if not isinstance(name, str) or not isinstance(model_type, str | None):
        return None
    family = next((family for ending, family in _ENDINGS if ending.search(name)), None)
    if family is ENCODER_DECODER:
        return _generating_family(config, model_type)
    if family is DECODER:
        return None if model_type in _OTHER_TYPES else DECODER
    # An encoder-decoder without a head gives what its decoder does.
    split = config.get("is_encoder_decoder") or model_type in _SEQUENCE_TO_SEQUENCE_TYPES
    if family is None or (family is FEATURE_EXTRACTION and split):
        return None
    return family if _takes_only_text(config, model_type) else None


def auto_model(family: Family, config: Mapping[str, Any] | None = None) -> Any:
    """Return the class of transformers that loads a family, or the model of it with this ``config.json``. Imports transformers."""
    import transformers

    leave_out_absent_parts()
    return getattr(transformers, loader_of(family, config or {}))


def loader_of(family: Family, config: Mapping[str, Any]) -> str:
    """Return the name of the class of transformers that loads a model of a family; one that takes images too is loaded whole, if its file has it whole."""
    names, kind = config.get("architectures"), config.get("model_type")
    whole = isinstance(names, list) and str(names[0] if names else "").endswith("ForConditionalGeneration")
    if family is DECODER and whole and isinstance(kind, str):
        return _TEXT_OF_MANY_TYPES.get(kind, family.auto_class)
    return family.auto_class


def task_of(family: Family, config: Mapping[str, Any]) -> str:
    """Return the name of a model's task on model hubs: that of its family, unless it is of a type that takes sound."""
    kind = config.get("model_type")
    return _TASKS_WITH_SOUND.get(kind, family.task) if family is DECODER and isinstance(kind, str) else family.task


def class_name(family: Family, config: Mapping[str, Any]) -> str | None:
    """Return the class that transformers' auto class of a family takes for models of this type; None if it has none.

    Imports transformers.
    """
    import transformers

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        return None
    classes = auto_model(family)._model_mapping.get(transformers.CONFIG_MAPPING[kind], None)
    first = classes[0] if isinstance(classes, tuple | list) else classes
    return first.__name__ if first is not None else None


def takes_more_than_text(config: Mapping[str, Any]) -> bool:
    """Return whether a model, or one that it is part of, takes images or sound."""
    return any(config.get(key) is not None for key in _OTHER_INPUTS)


def has_own_layout(config: Mapping[str, Any]) -> bool:
    """Return whether a model's files have its publisher's layout, and transformers' class of the same name and type reads another one."""
    return config.get("model_type") == "qwen3_asr" and "thinker_config" in config


def keeps_states(config: Mapping[str, Any]) -> bool:
    """Return whether a decoder has layers that keep a state beside, or instead of, keys and values of attention."""
    kinds = config.get("layer_types")
    keeps = isinstance(kinds, list) and any(str(kind).startswith(_STATE_LAYERS) for kind in kinds)
    return keeps or any(config.get(key) is not None for key in _STATES)


def mixes_experts(config: Mapping[str, Any]) -> bool:
    """Return whether a model has layers of several experts, of which each token takes a few."""
    listed = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if config.get("model_type") == "nemotron_h" and isinstance(listed, list | str) and not {"moe", "E"} & set(listed):
        return False  # transformers writes numbers of experts for Nemotron-H also where no layer has them
    return any(isinstance(config.get(key), int) and config[key] > 1 for key in _EXPERTS)


def _generating_family(config: Mapping[str, Any], model_type: str | None) -> Family | None:
    """Return the family of a model that transformers calls ForConditionalGeneration."""
    if not config.get("is_encoder_decoder"):
        return DECODER if model_type in _TEXT_OF_MANY_TYPES and not has_own_layout(config) else None
    if model_type in _SPEECH_TYPES:
        return _SPEECH_TYPES[model_type]
    return ENCODER_DECODER if _takes_only_text(config, model_type) else None


def _takes_only_text(config: Mapping[str, Any], model_type: str | None) -> bool:
    if model_type in _OTHER_TYPES or _OTHER_SENSES.search(model_type or ""):
        return False
    return not takes_more_than_text(config) and isinstance(config.get("vocab_size"), int)


def _family_of_type(config: Mapping[str, Any], model_type: object) -> Family | None:
    if not isinstance(model_type, str):
        return None
    if config.get("is_encoder_decoder"):
        known = model_type in (*_SPEECH_TYPES, *_SEQUENCE_TO_SEQUENCE_TYPES)
        return _generating_family(config, model_type) if known else None
    return DECODER if model_type in _DECODER_TYPES else None

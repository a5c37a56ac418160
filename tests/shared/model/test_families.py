"""A model's family, from configurations that transformers writes."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

from slipway.errors import CheckpointValidationError
from slipway.model import families
from slipway.model.configuration import ModelConfig
from slipway.model.families import FAMILIES, Comparison, auto_model, family_of, mixes_experts

KNOWN = [
    ("Qwen3ForCausalLM", "Qwen3Config", "decoder"),
    ("LlamaForCausalLM", "LlamaConfig", "decoder"),
    ("GPT2LMHeadModel", "GPT2Config", "decoder"),
    ("Gemma3ForCausalLM", "Gemma3TextConfig", "decoder"),
    ("Gemma3ForConditionalGeneration", "Gemma3Config", "decoder"),
    ("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", "decoder"),
    ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", "decoder"),
    ("Qwen3_5ForCausalLM", "Qwen3_5Config", "decoder"),
    ("Llama4ForConditionalGeneration", "Llama4Config", "decoder"),
    ("LlavaForConditionalGeneration", "LlavaConfig", "decoder"),
    ("Mistral3ForConditionalGeneration", "Mistral3Config", "decoder"),
    ("BartForCausalLM", "BartConfig", "decoder"),
    ("MarianMTModel", "MarianConfig", "encoder-decoder"),
    ("T5ForConditionalGeneration", "T5Config", "encoder-decoder"),
    ("MT5ForConditionalGeneration", "MT5Config", "encoder-decoder"),
    ("BartForConditionalGeneration", "BartConfig", "encoder-decoder"),
    ("PegasusForConditionalGeneration", "PegasusConfig", "encoder-decoder"),
    ("WhisperForConditionalGeneration", "WhisperConfig", "speech encoder-decoder"),
    ("Speech2TextForConditionalGeneration", "Speech2TextConfig", "speech encoder-decoder"),
    ("Qwen3ASRForConditionalGeneration", "Qwen3ASRConfig", "decoder"),
    ("VoxtralForConditionalGeneration", "VoxtralConfig", "decoder"),
    ("MoonshineForConditionalGeneration", "MoonshineConfig", "raw speech encoder-decoder"),
    ("BertForSequenceClassification", "BertConfig", "sequence classifier"),
    ("RobertaForSequenceClassification", "RobertaConfig", "sequence classifier"),
    ("DistilBertForSequenceClassification", "DistilBertConfig", "sequence classifier"),
    ("LlamaForSequenceClassification", "LlamaConfig", "sequence classifier"),
    ("Qwen3ForSequenceClassification", "Qwen3Config", "sequence classifier"),
    ("BertForTokenClassification", "BertConfig", "token classifier"),
    ("Qwen3ForTokenClassification", "Qwen3Config", "token classifier"),
    ("RobertaForQuestionAnswering", "RobertaConfig", "question answering"),
    ("XLNetForQuestionAnsweringSimple", "XLNetConfig", "question answering"),
    ("BertForMaskedLM", "BertConfig", "masked language model"),
    ("DistilBertForMaskedLM", "DistilBertConfig", "masked language model"),
    ("BertModel", "BertConfig", "feature extraction"),
    ("MPNetModel", "MPNetConfig", "feature extraction"),
    ("Qwen3Model", "Qwen3Config", "feature extraction"),
]
UNKNOWN = [
    ("ViTForImageClassification", "ViTConfig"),
    ("ViTModel", "ViTConfig"),
    ("CLIPModel", "CLIPConfig"),
    ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config"),
    ("Wav2Vec2Model", "Wav2Vec2Config"),
    ("PaliGemmaForConditionalGeneration", "PaliGemmaConfig"),
    ("Blip2ForConditionalGeneration", "Blip2Config"),
    ("LayoutLMForTokenClassification", "LayoutLMConfig"),
    ("GPT2DoubleHeadsModel", "GPT2Config"),
    ("T5EncoderModel", "T5Config"),
    ("T5Model", "T5Config"),
    ("BartModel", "BartConfig"),
    ("VisionEncoderDecoderModel", "ViTConfig"),
    ("BertForPreTraining", "BertConfig"),
    ("BertForMultipleChoice", "BertConfig"),
    ("WhisperForAudioClassification", "WhisperConfig"),
    ("XLNetForQuestionAnswering", "XLNetConfig"),
    ("MoonshineStreamingForConditionalGeneration", "MoonshineStreamingConfig"),
]
BY_TYPE = [
    ("Qwen3Config", "decoder"),
    ("MarianConfig", "encoder-decoder"),
    ("WhisperConfig", "speech encoder-decoder"),
    ("MoonshineConfig", "raw speech encoder-decoder"),
    ("BertConfig", None),
    ("ViTConfig", None),
]


def write(folder: Path, config_class: str, architecture: str | None) -> Path:
    """A ``config.json`` as transformers saves it."""
    import transformers

    config = getattr(transformers, config_class)()
    config.architectures = [architecture] if architecture else None
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("architecture", "config", "name"), KNOWN, ids=[case[0] for case in KNOWN])
def test_the_class_decides(tmp_path: Path, architecture: str, config: str, name: str) -> None:
    known = ModelConfig.read(write(tmp_path, config, architecture))
    assert known.family is not None
    assert known.family.name == name
    assert auto_model(known.family, known)._model_mapping[type_of(config)].__name__ == architecture


def type_of(config_class: str) -> Any:
    import transformers

    return getattr(transformers, config_class)


@pytest.mark.parametrize(("architecture", "config"), UNKNOWN, ids=[case[0] for case in UNKNOWN])
def test_a_model_of_no_known_family_has_none(tmp_path: Path, architecture: str, config: str) -> None:
    assert ModelConfig.read(write(tmp_path, config, architecture)).family is None


@pytest.mark.parametrize(("config", "name"), BY_TYPE, ids=[case[0] for case in BY_TYPE])
def test_without_a_class_the_type_decides_where_it_can(tmp_path: Path, config: str, name: str | None) -> None:
    family = ModelConfig.read(write(tmp_path, config, None)).family
    assert (family and family.name) == name


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": "BertModel"},
        {"architectures": [7], "model_type": "bert"},
        {"architectures": {"0": "BertModel"}},
        {"architectures": ["BertForMaskedLM"], "model_type": ["bert"], "vocab_size": 5},
        {"architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": "many"},
        {"architectures": ["Nonsense"], "model_type": "bert", "vocab_size": 5},
    ],
)
def test_what_makes_no_sense_has_no_family(config: dict[str, Any]) -> None:
    assert family_of(config) is None
    assert ModelConfig(config).description


def test_a_publisher_s_own_layout_of_a_model_has_no_family(tmp_path: Path) -> None:
    """Qwen's own files of Qwen3-ASR have all settings and weights within a "thinker", which transformers' class of this name does not read."""
    known = json.loads(
        (write(tmp_path, "Qwen3ASRConfig", "Qwen3ASRForConditionalGeneration") / "config.json").read_text()
    )
    own = {"thinker_config": {name: known.pop(name) for name in ("text_config", "audio_config")}, **known}
    assert family_of(own) is None


def test_an_encoder_decoder_without_a_head_is_none_whatever_its_configuration_leaves_out(tmp_path: Path) -> None:
    config = json.loads((write(tmp_path, "T5Config", "T5Model") / "config.json").read_text())
    del config["is_encoder_decoder"]
    assert family_of(config) is None


def test_the_task_of_a_decoder_that_takes_sound_is_its_own() -> None:
    decoder, speech = families.DECODER, families.SPEECH
    assert families.task_of(decoder, {"model_type": "qwen3_asr"}) == "automatic-speech-recognition" == speech.task
    assert families.task_of(decoder, {"model_type": "voxtral"}) == "audio-text-to-text"
    assert families.task_of(decoder, {"model_type": ["voxtral"]}) == families.task_of(decoder, {}) == decoder.task
    assert families.task_of(speech, {"model_type": "voxtral"}) == speech.task


def test_a_model_is_named_by_its_family_and_class() -> None:
    assert ModelConfig(
        {"architectures": ["MarianMTModel"], "is_encoder_decoder": True, "vocab_size": 9}
    ).description == ("encoder-decoder (MarianMTModel)")
    assert ModelConfig({"architectures": ["ViTModel"], "model_type": "vit"}).description == "ViTModel"
    assert ModelConfig({"model_type": "model-of-tomorrow"}).description == "model-of-tomorrow"
    assert "\x1b" not in ModelConfig({"model_type": "\x1b[31m"}).description


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointValidationError) as caught:
        ModelConfig.read(tmp_path)
    assert caught.value.reason == "BASE_MODEL_INVALID"


def test_families_are_told_apart_by_name_and_know_their_class() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) == 9
    assert {family.comparison for family in FAMILIES} == set(Comparison)
    assert [family.name for family in FAMILIES if family.generates] == [
        "decoder",
        "encoder-decoder",
        "speech encoder-decoder",
        "raw speech encoder-decoder",
    ]
    for family in FAMILIES:
        assert auto_model(family).__name__ == family.auto_class


def transformers_classes() -> list[tuple[str, str]]:
    """Model type and class of every model that transformers loads by any of its Auto classes."""
    mappings = importlib.import_module("transformers.models.auto.modeling_auto")
    found = set()
    for name, mapping in vars(mappings).items():
        if name.startswith("MODEL") and name.endswith("_MAPPING_NAMES"):
            for model_type, named in mapping.items():
                found |= {(model_type, one) for one in ([named] if isinstance(named, str) else named)}
    return sorted(found)


@pytest.mark.slow
def test_every_model_of_transformers_is_loaded_as_its_own_class_or_not_known(tmp_path: Path) -> None:
    """The class that a family's loader takes for a model type is the class that the configuration names, and it reads the
    first of the family's inputs."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = dict.fromkeys((family.name for family in FAMILIES), 0)
    for model_type, named in transformers_classes():
        try:
            config = CONFIG_MAPPING[model_type]()
        except (
            AttributeError,
            ImportError,
            KeyError,
            StrictDataclassError,
        ):  # of packages that are not installed, or no defaults
            continue
        document = json.loads(config.to_json_string(use_diff=True)) | {"architectures": [named]}
        family = family_of(document)
        if family is None:
            continue
        loaded = auto_model(family, document)._model_mapping[type(config)]
        candidates = loaded if isinstance(loaded, tuple) else (loaded,)
        assert named in [one.__name__ for one in candidates], (model_type, named, family.name)
        assert getattr(transformers, named).main_input_name == family.inputs[0], (model_type, named, family.name)
        known[family.name] += 1
    assert known["decoder"] > 150
    assert known.pop("raw speech encoder-decoder") == 1
    assert min(known.values()) >= 2, known


def test_nothing_heavy_is_imported() -> None:
    source = Path(families.__file__).read_text()
    assert "\nimport transformers" not in source
    assert "\nimport torch" not in source
    assert pkgutil.resolve_name("slipway.model.families:FAMILIES") is FAMILIES


def test_no_other_place_names_a_class_that_loads_models() -> None:
    """A stage that names one assumes a family; a part that is left out belongs to none."""
    root = Path(__file__).parents[3]
    named = {
        str(path.relative_to(root))
        for folder in ("shared", "services")
        for path in (root / folder).rglob("*.py")
        if re.search(r"\bAutoModel\w*", path.read_text())
    }
    assert named == {"shared/slipway/model/families.py", "shared/slipway/machine/absent_parts.py"}


@pytest.mark.parametrize(
    ("layers", "mixes"),
    [
        ({"layers_block_type": ["mamba", "attention", "mlp"]}, False),
        ({"layers_block_type": ["mamba", "moe"]}, True),
        ({"hybrid_override_pattern": "M*-"}, False),
        ({"hybrid_override_pattern": "M*E"}, True),
        ({"layers_block_type": 5}, True),
        ({}, True),
    ],
)
def test_numbers_of_experts_count_only_where_a_layer_has_them(layers: dict[str, object], *, mixes: bool) -> None:
    assert mixes_experts({"model_type": "nemotron_h", "n_routed_experts": 8, **layers}) is mixes
    assert mixes_experts({"model_type": "jamba", "num_experts": 16, **layers})

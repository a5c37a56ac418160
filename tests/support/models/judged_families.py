"""A small model of each family, an adapter with a visible effect, their merge by peft, and right and wrong outputs of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from support.models.validation_models import TEXT

VOCABULARY = 120
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
"""Special tokens in RoBERTa's order: the padding token is 1."""
PADDING, END = 1, 2
HEADS = ("lm_head", "proj_out", "score", "classifier", "qa_outputs", "cls.predictions.decoder")
LEVELS = {"fp16": torch.float16, "bf16": torch.bfloat16}

_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 80, "pad_token_id": PADDING, "initializer_range": 0.2,
}  # fmt: skip
_ENCODER_DECODER = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 80,
    "pad_token_id": PADDING, "bos_token_id": 0, "eos_token_id": END, "init_std": 0.2,
}  # fmt: skip


def _marian() -> Any:
    return transformers.MarianMTModel(transformers.MarianConfig(**_ENCODER_DECODER, decoder_start_token_id=PADDING))


def _bart() -> Any:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**_ENCODER_DECODER, decoder_start_token_id=END)
    )


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=PADDING,
        eos_token_id=END, decoder_start_token_id=PADDING, initializer_factor=1.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=100, max_target_positions=80,
        pad_token_id=PADDING, bos_token_id=0, eos_token_id=END, decoder_start_token_id=0, init_std=0.2,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def _moonshine() -> Any:
    config = transformers.MoonshineConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4, pad_head_dim_to_multiple_of=16,
        max_position_embeddings=80, pad_token_id=PADDING, bos_token_id=0, eos_token_id=END, decoder_start_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    return transformers.MoonshineForConditionalGeneration(config)


def save_raw_extractor(folder: Path) -> None:
    """Save a feature extractor that leaves samples as they are, as Moonshine's."""
    transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True).save_pretrained(folder)


def _bert(name: str, **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(transformers.BertConfig(**_ENCODER, **more))


def _roberta() -> Any:
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**_ENCODER, num_labels=3))


def _qwen3_classifier() -> Any:
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=80, initializer_range=0.2, pad_token_id=PADDING,
        num_labels=3,
    )  # fmt: skip
    return transformers.Qwen3ForSequenceClassification(config)


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=80, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2,
        bos_token_id=END, eos_token_id=END,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


_QUERY = ["query", "value"]
MAKERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "gpt2": (_gpt2, ["c_attn"]),
    "marian": (_marian, ["q_proj", "v_proj", "fc1"]),
    "bart": (_bart, ["q_proj", "v_proj", "fc1"]),
    "t5": (_t5, ["q", "v", "wi"]),
    "whisper": (_whisper, ["q_proj", "v_proj"]),
    "moonshine": (_moonshine, ["q_proj", "v_proj"]),
    "bert-classes": (_bert("BertForSequenceClassification", num_labels=3), _QUERY),
    "bert-labels": (
        _bert("BertForSequenceClassification", num_labels=4, problem_type="multi_label_classification"),
        _QUERY,
    ),
    "bert-score": (_bert("BertForSequenceClassification", num_labels=1), _QUERY),
    "bert-tokens": (_bert("BertForTokenClassification", num_labels=5), _QUERY),
    "bert-answers": (_bert("BertForQuestionAnswering"), _QUERY),
    "bert-masked": (_bert("BertForMaskedLM"), _QUERY),
    "bert-embeddings": (_bert("BertModel"), _QUERY),
    "roberta-classes": (_roberta, _QUERY),
    "qwen3-classes": (_qwen3_classifier, ["q_proj", "v_proj", "down_proj"]),
}
"""Base model and adapted modules by name."""


def save_tokenizer(folder: Path) -> None:
    """Make a tokenizer that puts a token before and one after each text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", END)]
    )
    names = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in names.items()}
    )
    fast.save_pretrained(folder)


@dataclass(frozen=True)
class FamilyModel:
    """Folders of one model: its base and its adapter.

    Attributes:
        name: Key of :data:`MAKERS`.
        root: Folder of its folders.
        tokenizer: Whether it has a tokenizer.
    """

    name: str
    root: Path
    tokenizer: bool = True

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def adapter(self) -> Path:
        return self.root / "adapter"

    def base_module(self) -> Any:
        torch.manual_seed(3)
        return MAKERS[self.name][0]().eval()

    def adapted(self) -> PeftModel:
        torch.manual_seed(5)
        config = LoraConfig(r=4, lora_alpha=6, target_modules=MAKERS[self.name][1], init_lora_weights=False)
        return get_peft_model(self.base_module(), config).eval()

    def output(self, name: str, module: Any, *, level: str = "") -> Path:
        """Write a model into a folder, at a level if one is named."""
        folder = self.root / name
        module.save_pretrained(folder)
        self._beside(folder)
        if level:
            (folder / "quantization.json").write_text(json.dumps({"level": level}))
        return folder

    def merged(self, *, factor: float = 1.0) -> Any:
        """Merge base + adapter by peft's own merge, at another scale if one is given."""
        module = self.adapted()
        for layer in module.modules():
            if isinstance(getattr(layer, "scaling", None), dict):  # attention has a scaling too, a float
                layer.scaling = {key: value * factor for key, value in layer.scaling.items()}
        return module.merge_and_unload()

    def outputs(self) -> dict[str, Path]:
        """Write correct outputs of every level."""
        found = {"pytorch": self.output("pytorch", self.merged())}
        found |= {f"pytorch-{level}": self.output(level, self.merged().to(dtype)) for level, dtype in LEVELS.items()}
        return {**found, "pytorch-int8": self.output("int8", rounded(self.merged(), bits=8), level="int8")}

    def _beside(self, folder: Path) -> None:
        if self.tokenizer:
            save_tokenizer(folder)
        if self.name == "whisper":
            transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2).save_pretrained(folder)
        if self.name == "moonshine":
            save_raw_extractor(folder)


def make(name: str, root: Path, *, tokenizer: bool = True) -> FamilyModel:
    """Write base and adapter."""
    found = FamilyModel(name, root, tokenizer)
    found.output("base", found.base_module())
    found.adapted().save_pretrained(found.adapter)
    return found


def rounded(module: Any, *, bits: int) -> Any:
    """Round the weights of linear layers other than the head to some bits in groups of 32; keep them in float32."""
    largest = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for name, layer in module.named_modules():
            if isinstance(layer, torch.nn.Linear | transformers.pytorch_utils.Conv1D) and name not in HEADS:
                weight = layer.weight
                groups = weight.reshape(-1, 32) if weight.numel() % 32 == 0 else weight.reshape(1, -1)
                scale = groups.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / largest
                weight.copy_(((groups / scale).round() * scale).reshape(weight.shape))
    return module

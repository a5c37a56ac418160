"""Make random inputs for a model of a family, and compute its compared outputs on them. Functions import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipway.model.configuration import token_of
from slipway.model.families import FEATURE_EXTRACTION, PAIRS, RAW_SPEECH, SEQUENCE_CLASSIFIER, Family

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = {SEQUENCE_CLASSIFIER: 8}
"""Rows by family: a classifier returns only a few numbers per row."""
_SPECIAL = ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id")
_FRAMES = 64
"""Frames of sound, for models that take any number of them."""
_SAMPLES = 16_000
"""Samples of sound, for models that take them as they are."""


def sample_inputs(model: Any, family: Family, *, rows: int = 2, length: int = 8) -> list[dict[str, Tensor]]:
    """Make inputs for calls of the model, the same ones each time: random tokens, of which none but the last is special.

    The last one ends the text, because classifiers look for it. Rows come in one call, except for a classifier that knows no
    padding: that takes one row at a time.
    """
    import torch

    config = model.config
    generator = torch.Generator().manual_seed(0)
    rows = 1 if family.takes_sound else _ROWS.get(family, rows)  # a second of sound is long already
    length = max(2, min(length, (_count(config, "max_position_embeddings") or length + 2) - 2))

    def tokens(size: int) -> Tensor:
        special = [value for name in _SPECIAL for value in _special_tokens(model, name) if 0 <= value < size]
        usual = torch.ones(size, dtype=torch.bool)
        usual[special] = False
        choice = usual.nonzero()[:, 0] if usual.any() else torch.arange(size)
        drawn = choice[torch.randint(0, len(choice), (rows, length), generator=generator)]  # (rows, length)
        ends = [end for end in _special_tokens(model, "eos_token_id") if 0 <= end < size]
        drawn[:, -1:] = ends[0] if ends else drawn[:, -1:]
        return drawn

    size = int(model.get_input_embeddings().num_embeddings)
    inputs = {"input_ids": tokens(size)} if not family.takes_sound else {}
    if family.takes_sound:
        shape = (1, _SAMPLES) if family is RAW_SPEECH else _sound_shape(config)
        inputs[family.inputs[0]] = torch.randn(shape, generator=generator).to(model.dtype)
    else:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if family in PAIRS:
        size_of_decoder = _count(config, "decoder_vocab_size") or _count(config, "tgt_vocab_size") or size
        inputs["decoder_input_ids"] = tokens(size_of_decoder)
    if family is SEQUENCE_CLASSIFIER and token_of(config, "pad_token_id") is None:
        return [{name: values[row : row + 1] for name, values in inputs.items()} for row in range(rows)]
    return [inputs]


def compared_outputs(model: Any, family: Family, inputs: list[dict[str, Tensor]]) -> Tensor:
    """Run the model, and return its compared outputs: (positions, values of a position).

    A model without the outputs of its family, such as a ``T5Model``, is compared by its last hidden states.

    Raises:
        LookupError: The model has neither.
    """
    import torch

    results = []
    with torch.no_grad():
        for call in inputs:
            given = model.eval()(**call)
            names = family.outputs if family.outputs[0] in given else FEATURE_EXTRACTION.outputs
            parts = [given[name] for name in names]
            values = parts[0] if len(parts) == 1 else torch.stack(parts, dim=-1)
            results.append(values.reshape(-1, values.shape[-1]).double())
    return torch.cat(results)


def _sound_shape(config: Any) -> tuple[int, ...]:
    """Return the shape of the frames that a speech model takes; Whisper takes only its full window."""
    if config.model_type == "whisper":
        return 1, config.num_mel_bins, 2 * config.max_source_positions
    return 1, _FRAMES, config.input_feat_per_channel * config.input_channels


def _count(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _special_tokens(model: Any, name: str) -> list[int]:
    """Return the tokens of a setting, which transformers keeps with the model's or with the generation's."""
    holders = (model.config, model.config.get_text_config(), getattr(model, "generation_config", None))
    return next((tokens for holder in holders if (tokens := _listed_numbers(getattr(holder, name, None)))), [])


def _listed_numbers(value: object) -> list[int]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]

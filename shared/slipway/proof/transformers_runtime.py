"""Run a Hugging Face model folder of any family with transformers on the CPU, and return the results to compare.

Axes as in :mod:`slipway.proof.runtime`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
import transformers.modeling_utils

from slipway.errors import CheckpointValidationError
from slipway.model.configuration import token_of
from slipway.model.families import DECODER, Comparison, Family, auto_model
from slipway.model.folder import ModelFolder
from slipway.model.model_facts import CannotBuildError, check_loadable, configuration_of
from slipway.model.pytorch.block_passes import BlockPasses, Setting
from slipway.model.pytorch.computed_buffers import recompute_buffers
from slipway.model.pytorch.joined_weights import leave_joined_out
from slipway.model.pytorch.wide_layers import widen_while_computing
from slipway.model.sentences import Pooling, UnknownPoolingError, load_pooling, pool
from slipway.model.trained import TrainedModel
from slipway.proof.numerics import Logits
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import NOT_BY_LAYERS, Bounds, NotRunnable, Past, Step, Unusable, known_family
from slipway.proof.sights import Sight
from slipway.validation.speed import Engine

LIMITS_OF_LENGTH = ("max_target_positions", "max_position_embeddings")
"""Settings with the largest number of tokens; the decoder's, if the encoder has its own."""
_COMPUTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types that are computed with."""

_CACHES = ("past_key_values", "cache_params")
"""Names of a decoder's cache; the second is that of models with states alone (Mamba)."""

T = TypeVar("T")
Call = Callable[[Any, Step], tuple[torch.Tensor, Past]]
"""Function from the module and one step to the results and the cache for the next step."""


class TransformersModel:
    """A model in PyTorch on the CPU; see :class:`slipway.proof.runtime.LanguageModel`."""

    device = "cpu"
    hears = True
    preparation_seconds = 0.0

    def __init__(
        self,
        module: Any,
        family: Family = DECODER,
        *,
        stored: str,
        pooling: Pooling | None = None,
        by_layers: bool = False,
    ) -> None:
        self._module = module.eval()
        plain = module.get_base_model() if hasattr(module, "get_base_model") else module
        # peft's own classes accept the arguments of some families only; the adapter is in the layers.
        self._called = self._module if family.comparison is Comparison.NEXT_TOKEN else plain
        self._call = choose_call(family.comparison, plain)
        self._served_as: dict[str, torch.dtype] = {}
        self._restore: Callable[[], None] = lambda: None
        self._passes = _follow_blocks(module) if by_layers else None
        self.has_cache = family.generates
        self._pooling = pooling
        self.embeds: bool | None = pooling is not None
        self.architecture = type(plain).__name__
        self.native_dtype = str(plain.dtype).removeprefix("torch.")
        parts = (plain.config, plain.config.get_text_config())
        limits = (getattr(part, name, None) for part in parts for name in LIMITS_OF_LENGTH)
        limit = next((length for length in limits if length), 1 << 30)
        # A decoder with a classifier finds the last token by its padding token, and refuses a batch without one.
        alone = family.comparison is Comparison.CLASSES and token_of(plain.config, "pad_token_id") is None
        self.bounds = Bounds(batch=1 if alone else 1 << 30, sequence=limit, past=limit)
        self.engine = Engine(
            runtime="transformers",
            version=f"transformers {transformers.__version__}, torch {torch.__version__}",
            stored_dtype=stored,
            compute_dtype="float32",
            native_dtype=self.native_dtype,
        )

    @torch.no_grad()  # not inference_mode: compressed-tensors decompresses in the first call and converts later
    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        if self._passes is None:
            step = replace(step, final=False)
        elif not self._passes.inside:
            return self.together([partial(self.forward, step)])[0]
        results, past = self._call(self._called, step)
        return results.float().numpy(), past

    def watch_layers(self, report: Callable[[int, int], None]) -> None:
        """As :meth:`slipway.proof.runtime.LanguageModel.watch_layers`."""
        if self._passes is not None:
            self._passes.on_block = report

    def together(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """As :meth:`slipway.proof.runtime.LanguageModel.together`."""
        return [job() for job in jobs] if self._passes is None else self._passes.together(jobs)

    def within(self, setting: Setting) -> AbstractContextManager[Any]:
        """Return a context in which a job's calls are computed; other jobs compute without it."""
        return setting() if self._passes is None else self._passes.within(setting)

    @torch.no_grad()
    def embed(self, step: Step) -> Logits:
        """As :meth:`slipway.proof.runtime.LanguageModel.embed`."""
        assert self._pooling is not None
        results, _ = self._call(self._called, step)
        vectors: Logits = pool(results.float(), torch.from_numpy(step.attention_mask), self._pooling).numpy()
        return vectors[:, None]

    @torch.no_grad()
    def look(self, sight: Sight) -> Logits:
        """As :meth:`slipway.proof.runtime.LanguageModel.look`."""
        if self._passes is not None:
            raise NotRunnable(NOT_BY_LAYERS)
        ids = _tensor(sight.tokens)[None]
        given = {name: _tensor(values) for name, values in sight.arguments.items()}
        if sight.types:
            given[sight.types] = (ids == sight.token).long()
        try:
            results = self._called(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given).logits
        except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
            raise Unusable(
                f"transformers cannot compute {sight.sense} with it: {type(error).__name__}: {error}"
            ) from error
        behind: Logits = results[0, sight.end :].float().numpy()
        return behind

    def prepare_comparison(self) -> None:
        """Switch to float32. The weights keep their stored values, as widening a float is exact; what the class computes is computed again."""
        # transformers refuses its own .float() for quantized models because of other formats. With compressed-tensors the
        # codes are integers, which this does not change, and the scales' data type is the one of the computation.
        self._served_as = {name: tensor.dtype for name, tensor in self._tensors()}
        if self._passes is None:
            self._restore = widen_while_computing(self._module)
            torch.nn.Module.float(self._module)
        else:
            self._restore = self._passes.weights.widen()
        short = (name for name, dtype in self._served_as.items() if dtype in (torch.bfloat16, torch.float16))
        recompute_buffers(self._module, list(short))

    def leave_comparison(self) -> None:
        """Switch back to the native types; narrowing widened weights restores their values."""
        self._restore()
        if self._passes is not None:
            return
        native = getattr(torch, self.native_dtype)
        for name, tensor in self._tensors():
            dtype = self._served_as.get(name, tensor.dtype)
            if dtype not in _COMPUTED and tensor.dtype in _COMPUTED:
                dtype = native  # codes, which compressed-tensors has unpacked under the same name meanwhile
            if dtype != tensor.dtype:
                tensor.data = tensor.data.to(dtype)

    @property
    def module(self) -> torch.nn.Module:
        """Return the module."""
        module: torch.nn.Module = self._module
        return module

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [*self._module.named_parameters(), *self._module.named_buffers()]

    def peak_device_bytes(self) -> int | None:
        """Return None: the model runs on the CPU."""
        return None


def load(folder: Path, *, threads: int, by_layers: bool = False) -> TransformersModel:
    """Load an output in its stored data type; ``by_layers`` computes it layer by layer, so that it need not fit into memory.

    Raises:
        NotRunnable: It is to be computed layer by layer, and its layers are not known.
        Unusable: The folder has no model of a known family that transformers can load.
    """
    torch.set_num_threads(threads)
    module, family = from_pretrained(folder, dtype="auto", by_layers=by_layers)
    pooling = known_pooling(folder)
    return TransformersModel(module, family, stored=stored_dtype(folder), pooling=pooling, by_layers=by_layers)


def known_pooling(*folders: Path | None) -> Pooling | None:
    """Return how a sentence encoder makes one vector of a text, by the first folder that says; None if that is not known."""
    try:
        return load_pooling(*folders)
    except UnknownPoolingError:
        return None


def _follow_blocks(module: Any) -> BlockPasses:
    try:
        return BlockPasses(module)
    except ValueError as error:
        raise NotRunnable(f"it does not fit into memory, and cannot be computed layer by layer: {error}") from error


def from_pretrained(
    folder: Path, *, dtype: Any, trained: TrainedModel | None = None, by_layers: bool = False
) -> tuple[Any, Family]:
    """Load the model in a folder and return it with its family; none of its code or pickles is run.

    With ``trained`` it is loaded as that class, with a new head, as it was when the training began. With ``by_layers`` it only computes as a
    :class:`TransformersModel` that is told so too: weights that transformers joins are left to the layers.

    Raises:
        Unusable: It cannot be loaded, or its family is unknown.
    """
    try:
        stored = ModelFolder.open(folder)  # transformers would read its configuration without a limit
        config = trained.config if trained else stored.config
        family = known_family(config, folder)
        loader = auto_model(family, config)
        check_loadable(stored, loader, config=config if trained else None)
        headed = {"config": configuration_of(config), "ignore_mismatched_sizes": True} if trained else {}
        with leave_joined_out(stored.tensors) if by_layers else nullcontext():
            module = loader.from_pretrained(
                str(folder), dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False, **headed
            )
    except (
        CannotBuildError, CheckpointValidationError, OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError
    ) as error:  # fmt: skip
        raise Unusable(f"transformers cannot load {folder.name!r}: {type(error).__name__}: {error}") from error
    return module, family


def choose_call(comparison: Comparison, module: Any) -> Call:
    """Choose the call for a kind of comparison; a decoder gets positions if its forward accepts them, and its cache by the name it has for it."""
    if comparison is Comparison.NEXT_TOKEN:
        accepted = inspect.signature(module.forward).parameters
        cache = next((name for name in _CACHES if name in accepted), _CACHES[0])
        return partial(_next_tokens, cache=cache, positions="position_ids" in accepted)
    return _CALLS[comparison]


def _next_tokens(module: Any, step: Step, *, cache: str, positions: bool) -> tuple[torch.Tensor, Past]:
    inputs = _text(step)
    if positions:
        inputs["position_ids"] = _tensor(step.position_ids)
    output = module(**inputs, **{cache: step.past}, use_cache=step.past is not None or not step.final)
    return output.logits, getattr(output, cache)


def _teacher_forced(module: Any, step: Step) -> tuple[torch.Tensor, Past]:
    """Run the encoder in the first step, by itself as generating does; later steps reuse its output."""
    source = step.source
    assert source is not None
    masked = {} if source.mask is None else {"attention_mask": _tensor(source.mask)}
    if step.past is None:
        values = _tensor(source.values)
        values = values.to(module.dtype) if values.is_floating_point() else values
        encoded, cache = module.get_encoder()(**{module.main_input_name: values}, **masked, return_dict=True), None
    else:
        encoded, cache = step.past
    inputs = {"encoder_outputs": encoded, "decoder_input_ids": _tensor(step.input_ids), **masked}
    output = module(**inputs, past_key_values=cache, use_cache=True)
    return output.logits, (encoded, output.past_key_values)


def _classes(module: Any, step: Step) -> tuple[torch.Tensor, Past]:
    """Return classes (B, 1, C) of a whole text or (B, S, C) of its tokens; for several labels at once (B, C, 2), yes and no."""
    logits = module(**_text(step)).logits
    if module.config.problem_type == "multi_label_classification":
        logits = logits.flatten(1)
        return torch.stack([logits, torch.zeros_like(logits)], dim=-1), None
    return logits if logits.ndim == 3 else logits[:, None], None


def _spans(module: Any, step: Step) -> tuple[torch.Tensor, Past]:
    """Return the logits of the answer's start and end: (B, 2, S)."""
    output = module(**_text(step))
    return torch.stack([output.start_logits, output.end_logits], dim=1), None


def _masked_tokens(module: Any, step: Step) -> tuple[torch.Tensor, Past]:
    return module(**_text(step)).logits, None


def _embeddings(module: Any, step: Step) -> tuple[torch.Tensor, Past]:
    return module(**_text(step)).last_hidden_state, None


_CALLS: Mapping[Comparison, Call] = {
    Comparison.TEACHER_FORCED: _teacher_forced,
    Comparison.CLASSES: _classes,
    Comparison.SPANS: _spans,
    Comparison.MASKED_TOKENS: _masked_tokens,
    Comparison.EMBEDDINGS: _embeddings,
}


def _text(step: Step) -> dict[str, torch.Tensor]:
    return {"input_ids": _tensor(step.input_ids), "attention_mask": _tensor(step.attention_mask)}


def _tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))

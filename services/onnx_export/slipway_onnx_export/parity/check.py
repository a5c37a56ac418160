"""Run PyTorch, then ONNX Runtime, on the same conversations, and compare the results."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers

from slipway.errors import ONNXExportError
from slipway.machine.onnx_runtime import Opened, ProviderChoice
from slipway.model.configuration import token_of
from slipway.model.dtypes import FLOATS, torch_dtypes
from slipway.model.families import DECODER, PAIRS
from slipway.model.folder import ModelFolder
from slipway.model.graphs.calls import EVERY_CALL, Promise
from slipway.model.model_facts import CannotBuildError, check_loadable
from slipway.model.pytorch.traced_rotary import forget_longest_text
from slipway.model.pytorch.wide_layers import widen_while_computing
from slipway.proof.comparison import difference
from slipway.proof.onnx_errors import translate_ort_errors
from slipway_onnx_export.forms.activations import WantedActivations
from slipway_onnx_export.interface import room_of
from slipway_onnx_export.layered.blocks import LAST
from slipway_onnx_export.loading.cache_names import accept_past
from slipway_onnx_export.names import BATCH, EMBEDS, IMAGE_FEATURES, LOGITS, PAST, SEQUENCE
from slipway_onnx_export.parity.activations import Watch
from slipway_onnx_export.parity.conversations import conversations_of, texts_of
from slipway_onnx_export.parity.lengths import Lengths, Reach, lengths_of, reach_of, room_beyond
from slipway_onnx_export.parity.pictures import has_pictures, pictures_of, sessions_of_parts
from slipway_onnx_export.parity.rows import ROOM, Array, Conversation, Session, perturb_rounding
from slipway_onnx_export.parity.session import LayeredSession, OrtSession
from slipway_onnx_export.parity.states import describe_lost_states
from slipway_onnx_export.parity.translations import translations_of
from slipway_onnx_export.source import ModelSource

OnCall = Callable[[int, int], None]
_SHORT = (torch.bfloat16, torch.float16)
_MOST_NOISE = 100.0
"""Most times the tolerance that rounding can explain. Beyond it, the effect of rounding is not measured."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The result of the comparison.

    Attributes:
        max_abs_diff: Largest difference of a value at tokens that are not padding.
        scale: Largest absolute reference value, at least 1.
        calls: Number of compared calls of the model.
        provider: What ONNX Runtime computed on.
        note: Why it was not the GPU, although one is requested or present; otherwise empty.
        activations: Largest difference of an activation, relative to the largest value of its kind and layer (at least 1); None
            if the graph returns none.
        reach: What was compared beyond the attention window.
        lengths: What was compared beyond the other lengths at which the model begins to compute otherwise.
        beside: Largest differences of what graphs give that read pictures or embed tokens, by its name.
    """

    max_abs_diff: float
    scale: float
    calls: int
    provider: str = ""
    note: str = ""
    activations: float | None = None
    reach: Reach = Reach(0)  # noqa: RUF009 - it is frozen
    lengths: Lengths = Lengths()  # noqa: RUF009 - so is this
    beside: Mapping[str, float] = field(default_factory=dict)


def check_parity(
    source: ModelSource,
    folder: Path,
    *,
    tolerance: float,
    threads: int = 1,
    sizes: Mapping[str, int] = MappingProxyType({}),
    observed: WantedActivations = (),
    promise: Promise = EVERY_CALL,
    cached: bool = True,
    spare_bytes: int = 4 << 30,
    provider: ProviderChoice = "cpu",
    on_call: OnCall = lambda _done, _total: None,
) -> ParityReport:
    """Compare the graphs in a folder with PyTorch.

    PyTorch's model is unloaded before ONNX Runtime loads. Both leave large weights in their files (:func:`_load_in_float32`), so little memory is needed.

    Args:
        source: The model's folder.
        folder: Folder of the exported graphs.
        tolerance: Largest allowed difference relative to the largest reference value (at least 1), where rounding alone does not move
            PyTorch's own results further.
        threads: Threads that ONNX Runtime may use.
        sizes: Fixed sizes of the graphs' axes, by name.
        observed: The activations that the graphs return.
        promise: The calls that a decoder's graph takes, and the logits that it returns.
        cached: Whether the graphs have a cache.
        spare_bytes: Memory beyond what the comparison of short texts needs.
        provider: Execution provider of ONNX Runtime.
        on_call: Called before each call of a model with the number of finished calls and their total.

    Raises:
        ONNXExportError: ``EXPORT_PARITY_FAILED``, with the figures in ``about``.
    """
    watch = Watch(observed)
    room = _room(source, sizes)
    reach = reach_of(source, room=room, cached=cached, shared=promise.shared_buffer, spare_bytes=spare_bytes)
    lengths = lengths_of(source, room=room, shared=promise.shared_buffer)
    conversations = [
        watch.wrap(each)
        for each in _conversations(
            source, room=room, promise=promise, reach=reach, lengths=lengths, cached=cached, sizes=sizes
        )
    ]
    groups: dict[str, Sequence[Conversation]] = {LOGITS: conversations}
    if has_pictures(folder):
        features, embeddings, prompts = pictures_of(source)
        groups = {LOGITS: [*conversations, *prompts], IMAGE_FEATURES: features, EMBEDS: embeddings}
    every = [conversation for group in groups.values() for conversation in group]
    each = sum(conversation.calls for conversation in every)
    on_call(0, 2 * each)
    references = iter(_references(source, every, on_call=lambda done: on_call(done, 2 * each)))
    sessions, opened = _open_sessions(source, folder, threads=threads, provider=provider)
    calls = 0
    worst: dict[str, _Worst] = {}
    for name, group in groups.items():
        compared = list(zip(group, islice(references, len(group)), strict=True))
        worst[name] = _compare(compared, sessions, on_call=on_call, done=each + calls, total=2 * each)
        calls += sum(conversation.calls for conversation in group)
        worst[name].judge(source, tolerance, sessions)
    logits = worst.pop(LOGITS)
    return ParityReport(
        logits.diff,
        logits.scale,
        calls,
        opened.provider,
        opened.note,
        watch.judge(tolerance),
        reach,
        lengths,
        {name: found.diff for name, found in worst.items()},
    )


def _open_sessions(
    source: ModelSource, folder: Path, *, threads: int, provider: ProviderChoice
) -> tuple[Mapping[str, Session], Opened]:
    """Open the graphs of a folder; return the sessions by name, and what they compute on."""
    if (folder / f"{LAST}.onnx").is_file():
        layers = LayeredSession(folder, threads=threads, provider=provider)
        return {"model": layers}, layers.opened
    padding = token_of(source.config, "pad_token_id")
    sessions = {
        path.stem: OrtSession(path, source.family, threads=threads, padding=padding, provider=provider)
        for path in sorted(folder.glob("*.onnx"))
    }
    opened = next(iter(sessions.values())).opened
    return (sessions_of_parts(sessions) if has_pictures(folder) else sessions), opened


@dataclass(frozen=True, slots=True)
class _Worst:
    """The largest difference in some conversations.

    Attributes:
        diff: The difference.
        scale: Largest absolute reference value, at least 1.
        place: Conversation and call.
        furthest: That conversation, with PyTorch's results.
    """

    diff: float
    scale: float
    place: str
    furthest: tuple[Conversation, Sequence[Array]]

    def judge(self, source: ModelSource, tolerance: float, sessions: Mapping[str, Session]) -> None:
        """Check that the difference is allowed.

        Raises:
            ONNXExportError: ``EXPORT_PARITY_FAILED``.
        """
        allowed = tolerance * self.scale
        if allowed < self.diff <= _MOST_NOISE * allowed:
            allowed = max(allowed, ROOM * _measure_noise(source, *self.furthest))
        if self.diff > allowed:
            lost = describe_lost_states(sessions) if source.keeps_states else ""
            raise ONNXExportError(
                f"results differ from PyTorch's by {self.diff:.3g}, and {allowed:.3g} is allowed ({self.place}){lost and f': {lost}'}",
                reason="EXPORT_PARITY_FAILED",
                remedy="use another engine",
                about={"max_abs_diff": self.diff, "allowed": allowed, "scale": self.scale, "case": self.place},
            )


def _compare(
    compared: Sequence[tuple[Conversation, Sequence[Array]]],
    sessions: Mapping[str, Session],
    *,
    on_call: OnCall,
    done: int,
    total: int,
) -> _Worst:
    """Run conversations with ONNX Runtime, and return where they are furthest from PyTorch's results.

    ``done`` calls of ``total`` are finished before.
    """
    worst, where, scale, calls, furthest = 0.0, "", 1.0, 0, compared[0]
    for conversation, wanted in compared:
        for index, (result, reference) in enumerate(zip(_run(conversation, sessions), wanted, strict=True)):
            on_call(done + calls, total)
            scale = max(scale, float(np.abs(reference).max()))
            diff = difference(result, reference).largest
            calls += 1
            if diff > worst:
                worst, where, furthest = diff, f"{conversation.name}, call {index + 1}", (conversation, wanted)
    return _Worst(worst, scale, where, furthest)


def _room(source: ModelSource, sizes: Mapping[str, int]) -> int:
    """Return how many tokens a text may have in PyTorch and in the graphs."""
    fixed = sizes.get(SEQUENCE)
    if fixed is None:
        return max(room_of(source), room_beyond(source))
    return min(room_of(source), sizes[PAST] + 1 if sizes.get(PAST) else fixed)


def _conversations(
    source: ModelSource,
    *,
    room: int,
    promise: Promise,
    reach: Reach,
    lengths: Lengths,
    cached: bool,
    sizes: Mapping[str, int],
) -> Sequence[Conversation]:
    if source.family is DECODER:
        return list(
            conversations_of(
                source,
                room=room,
                promise=promise,
                reach=reach,
                lengths=lengths,
                cached=cached,
                one_row=sizes.get(BATCH) == 1,
            )
        )
    if source.family in PAIRS:
        return list(translations_of(source, room=room, reach=reach, lengths=lengths, cached=cached))
    return list(texts_of(source, room=room, reach=reach, lengths=lengths, fixed=SEQUENCE in sizes))


def _references(
    source: ModelSource, conversations: Sequence[Conversation], *, on_call: Callable[[int], None]
) -> list[list[Array]]:
    """Return PyTorch's results of each conversation, by call."""
    transformers.utils.logging.disable_progress_bar()
    kind = source.loader
    try:
        check_loadable(source.model, kind)
    except CannotBuildError as error:
        raise ONNXExportError(
            f"PyTorch cannot run the model for the comparison: {error}",
            reason="BASE_MODEL_INVALID",
            remedy="give a complete transformers model folder",
            about={"file": "config.json"},
        ) from error
    made: list[list[Array]] = []
    with _free_afterwards(), torch.inference_mode():
        model = accept_past(_load_in_float32(source.model, kind))
        for conversation in conversations:
            conversation.prepare(model)
            forget_longest_text(model)
            made.append([])
            for result in conversation.run_reference(model):
                made[-1].append(result)
                on_call(sum(map(len, made)))
        del model
    return made


def _measure_noise(source: ModelSource, conversation: Conversation, plain: Sequence[Array]) -> float:
    """Measure how far PyTorch's own results of a conversation move from ``plain`` if its layers round otherwise."""
    with _free_afterwards(), torch.inference_mode():
        model = accept_past(_load_in_float32(source.model, source.loader))
        conversation.prepare(model)
        with perturb_rounding(model):
            moved = list(conversation.run_reference(model))
        del model
    return max(difference(one, other).largest for one, other in zip(moved, plain, strict=True))


def _load_in_float32(folder: ModelFolder, kind: Any) -> Any:
    """Load a model that computes in float32.

    If all weights are stored in one 16-bit type, large ones stay mapped and are widened where they are used, which is exact. Eager attention is
    the simplest implementation; fused ones differ from each other in the results of padding rows.
    """
    ways = {"attn_implementation": "eager"}
    stored = {info.dtype for info in folder.tensors.values() if info.dtype in FLOATS}
    if stored in ({"BF16"}, {"F16"}):
        dtype = next(iter(torch_dtypes(*stored).values()))
        model = kind.from_pretrained(folder.path, dtype=dtype, trust_remote_code=False, **ways).eval()
        # A 16-bit buffer holds values that the model's code has computed and rounded.
        if all(buffer.dtype not in _SHORT for buffer in model.buffers()):
            widen_while_computing(model)
            return model.float()
        del model
    return kind.from_pretrained(folder.path, dtype=torch.float32, trust_remote_code=False, **ways).eval()


@contextmanager
def _free_afterwards() -> Iterator[None]:
    """Free the objects that the block made and dropped. Older objects are not searched: that takes longer than a small model's export."""
    frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not frozen:
            gc.unfreeze()


def _run(conversation: Conversation, sessions: Mapping[str, Session]) -> Iterator[Array]:
    """Run a conversation's calls with ONNX Runtime; a call that it cannot compute is a failed comparison."""

    def call_error(error: Exception) -> ONNXExportError:
        return ONNXExportError(
            f"onnxruntime cannot run the exported model ({conversation.name}): {error}",
            reason="EXPORT_PARITY_FAILED",
            remedy="use another engine",
            about={"case": conversation.name},
        )

    with translate_ort_errors(call_error):
        yield from conversation.run_exported(sessions)

"""Check that the exported file gives PyTorch's results, at other shapes than those it was made with."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
import transformers
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from slipway.errors import ONNXExportError
from slipway.machine.threads import session_options
from slipway.models.families import DECODER, auto_model
from slipway.models.model_facts import CannotBuildError, check_loadable
from slipway_onnx_export.source import WINDOW_LIMIT, ModelSource

Array = npt.NDArray[Any]
OnCall = Callable[[int, int], None]

# onnxruntime's exceptions have no common base class but Exception.
ORT_ERRORS = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation with the model: several calls with some tokens each, which pass on the KV cache.

    Attributes:
        name: Name in messages.
        pads: Left padding of each row, in tokens; the number of rows is the batch size.
        calls: New tokens per row in each call. The first call has an empty past.
    """

    name: str
    pads: tuple[int, ...]
    calls: tuple[int, ...]


CASES = (
    Case("batch 1, prefill and decode", pads=(0,), calls=(6, 1, 1)),
    Case("batch 1, sequence 1 from an empty past, then several tokens", pads=(0,), calls=(1, 4)),
    Case("batch 3, left padding, prefill and decode", pads=(0, 4, 2), calls=(7, 1, 1)),
    Case("batch 2, left padding, several tokens after a past", pads=(3, 0), calls=(5, 3, 1)),
)


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The result of the comparison.

    Attributes:
        max_abs_diff: Largest difference of a logit at tokens that are not padding.
        scale: Largest absolute reference logit, at least 1.
        calls: Number of compared calls of the model.
    """

    max_abs_diff: float
    scale: float
    calls: int


@dataclass
class _Conversation:
    """Inputs of a case and the reference logits of its calls without padding."""

    case: Case
    tokens: Array
    mask: Array
    logits: list[Array] = field(default_factory=list)

    def step(self, index: int) -> tuple[Array, Array, Array]:
        """Return token ids, attention mask and positions of one call. (batch, new), (batch, past + new), (batch, new)."""
        past = sum(self.case.calls[:index])
        end = past + self.case.calls[index]
        mask = self.mask[:, :end]
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:]
        return self.tokens[:, past:end], mask, positions

    def real(self, index: int, logits: Array) -> Array:
        """Select the logits of a call at tokens that are not padding. (batch, new, vocab) → (tokens, vocab)."""
        past = sum(self.case.calls[:index])
        kept: Array = logits[self.mask[:, past : past + self.case.calls[index]].astype(bool)]
        return kept


def check_parity(
    source: ModelSource,
    model_path: Path,
    *,
    tolerance: float,
    threads: int = 1,
    fixed_batch: bool = False,
    on_call: OnCall = lambda _done, _total: None,
) -> ParityReport:
    """Run PyTorch, then ONNX Runtime, on the same conversations and compare their logits.

    PyTorch's model is unloaded before ONNX Runtime loads, so the memory needed is that of one of them in float32.

    Args:
        source: The model's folder.
        model_path: The exported ``model.onnx``.
        tolerance: Largest allowed difference relative to the largest reference logit (at least 1).
        threads: Threads that ONNX Runtime may use.
        fixed_batch: Whether the file accepts batch 1 only.
        on_call: Called before each call of a model with the number of finished calls and their total.

    Raises:
        ONNXExportError: ``EXPORT_PARITY_FAILED``, with the figures in ``about``.
    """
    conversations = _conversations(source, fixed_batch=fixed_batch)
    each = sum(len(conversation.case.calls) for conversation in conversations)
    _reference(source, conversations, on_call=lambda done: on_call(done, 2 * each))
    session = _session(model_path, threads=threads)
    worst, where, scale, calls = 0.0, "", 1.0, 0
    for conversation in conversations:
        past: dict[str, Array] = _empty_past(session, batch=len(conversation.case.pads))
        for index, reference in enumerate(conversation.logits):
            on_call(each + calls, 2 * each)
            logits, past = _run_onnx(session, conversation, index, past)
            diff = float(np.abs(conversation.real(index, logits) - reference).max())
            scale = max(scale, float(np.abs(reference).max()))
            calls += 1
            if not diff <= worst:  # NaN counts as worse
                worst, where = diff, f"{conversation.case.name}, call {index + 1}"
    if not worst <= tolerance * scale:
        raise ONNXExportError(
            f"logits differ from PyTorch by {worst:.3g}, and {tolerance * scale:.3g} is allowed ({where})",
            reason="EXPORT_PARITY_FAILED",
            remedy="use another engine",
            about={"max_abs_diff": worst, "allowed": tolerance * scale, "scale": scale, "case": where},
        )
    return ParityReport(max_abs_diff=worst, scale=scale, calls=calls)


def _conversations(source: ModelSource, *, fixed_batch: bool) -> list[_Conversation]:
    cases = [case for case in CASES if not fixed_batch or len(case.pads) == 1]
    if fixed_batch:
        cases.append(Case("batch 1, left padding", pads=(3,), calls=(6, 1, 2)))
    if 0 < source.sliding_window <= WINDOW_LIMIT:
        cases.append(Case("beyond the sliding window", pads=(0,), calls=(source.sliding_window + 4, 1)))
    config = source.text_config
    room = getattr(config, "max_position_embeddings", None) or sum(cases[-1].calls)
    random = np.random.default_rng(0)
    made = []
    for case in (case for case in cases if sum(case.calls) <= room):
        total = sum(case.calls)
        tokens = random.integers(0, config.vocab_size, size=(len(case.pads), total), dtype=np.int64)
        mask = (np.arange(total)[None, :] >= np.array(case.pads)[:, None]).astype(np.int64)
        made.append(_Conversation(case, tokens, mask))
    return made


def _reference(source: ModelSource, conversations: list[_Conversation], *, on_call: Callable[[int], None]) -> None:
    """Store PyTorch's logits in the conversations."""
    done = 0
    on_call(done)
    transformers.utils.logging.disable_progress_bar()
    try:
        check_loadable(source.folder, auto_model(DECODER))
    except CannotBuildError as error:
        raise ONNXExportError(
            f"PyTorch cannot run the model for the comparison: {error}",
            reason="BASE_MODEL_INVALID",
            remedy="give a complete transformers model folder",
            about={"file": "config.json"},
        ) from error
    # Eager attention is the simplest implementation; fused ones differ from each other in the results of padding rows.
    model = (
        auto_model(DECODER)
        .from_pretrained(source.folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False)
        .eval()
    )
    with torch.inference_mode():
        for conversation in conversations:
            cache = transformers.DynamicCache(config=model.config)
            for index in range(len(conversation.case.calls)):
                on_call(done)
                done += 1
                ids, mask, positions = (torch.from_numpy(array.copy()) for array in conversation.step(index))
                out = model(
                    input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
                )
                conversation.logits.append(conversation.real(index, out.logits.numpy()))
    del model
    gc.collect()


def _session(model_path: Path, *, threads: int) -> Any:
    options = session_options(threads)
    try:
        return onnxruntime.InferenceSession(str(model_path), options, providers=["CPUExecutionProvider"])
    except ORT_ERRORS as error:
        raise ONNXExportError(
            f"onnxruntime {onnxruntime.__version__} cannot load the exported model: {error}",
            reason="EXPORT_PARITY_FAILED",
            remedy="use another engine or opset",
        ) from error


def _empty_past(session: Any, *, batch: int) -> dict[str, Array]:
    """Return an empty cache. Each tensor: (batch, heads, 0, head_dim)."""
    return {
        value.name: np.zeros((batch, value.shape[1], 0, value.shape[3]), dtype=np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }


def _run_onnx(
    session: Any, conversation: _Conversation, index: int, past: dict[str, Array]
) -> tuple[Array, dict[str, Array]]:
    ids, mask, positions = conversation.step(index)
    feed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}
    names = [value.name for value in session.get_outputs()]
    try:
        outputs = dict(zip(names, session.run(names, feed), strict=True))
    except ORT_ERRORS as error:
        shape = {"new": ids.shape, "total": mask.shape}
        raise ONNXExportError(
            f"onnxruntime cannot run the exported model ({conversation.case.name}, {shape}): {error}",
            reason="EXPORT_PARITY_FAILED",
            remedy="use another engine",
            about={"case": conversation.case.name},
        ) from error
    logits = outputs.pop("logits")
    return logits, {name.replace("present.", "past_key_values."): value for name, value in outputs.items()}

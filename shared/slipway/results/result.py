"""The result of an export: formats, places, quality, the attempts that made them, and outputs that validation had made again."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from slipway.base_match import BaseMatch
from slipway.errors import error_of_reason
from slipway.planning.references import VALIDATION
from slipway.representation import framed, named_few, preformatted, three_lines
from slipway.rpc.values import failure_of_status
from slipway.sizes import format_size
from slipway.texts import counted
from slipway.validation.findings import REJECTED, TOO_COARSE, failure_prefix, warning_prefix
from slipway.validation.parts import MultiTokenHead
from slipway_protos.v1 import export_pb2 as pb

_END_OF_FIRST_PAGE = "</header>"
_MOST_REPORT_CHARACTERS = 4 << 20


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class AttemptResult(_Value):
    """One attempt of one task.

    Attributes:
        task: Task within the export, such as ``quantize-onnx-int8``.
        stage: Stage that the task runs.
        number: Number of the attempt, from 1 within the task.
        outcome: ``succeeded``, ``failed``, ``cancelled`` …
        params: Parameters of this attempt.
        rule: Recovery rule that led to it; empty for the first.
        reused: Whether the result existed already and was taken from the store.
        worker: Worker that ran it.
        reason: Stable reason of a failure; empty otherwise.
        error_message: The fault with its remedy; empty on success.
        duration_seconds: Time from start to end; None while unknown.
        peak_memory_bytes: Peak memory of the stage's process; 0 if not measured.
        memory_sample_seconds: Time that each of ``memory_samples_bytes`` stands for.
        memory_samples_bytes: Resident memory of the stage's processes over time: the largest in each such time; empty if not measured.
        machine: Free resources of the machine when the attempt failed, in bytes: ``memory_available_bytes``,
            ``memory_total_bytes``, ``scratch_free_bytes``, ``store_free_bytes``; empty otherwise.
    """

    task: str
    stage: str
    number: int
    outcome: str
    params: dict[str, Any] = {}
    rule: str = ""
    reused: bool = False
    worker: str = ""
    reason: str = ""
    error_message: str = ""
    duration_seconds: float | None = None
    peak_memory_bytes: int = 0
    memory_sample_seconds: float = 0.0
    memory_samples_bytes: tuple[int, ...] = ()
    machine: dict[str, int] = {}

    @property
    def machine_left(self) -> str:
        """Describe the machine's free resources at the failure, for people; empty if unknown."""
        free = [
            f"{format_size(count)} free for {name.removesuffix('_free_bytes')}"
            for name, count in sorted(self.machine.items())
            if name.endswith("_free_bytes")
        ]
        available, total = (self.machine.get(f"memory_{name}_bytes", 0) for name in ("available", "total"))
        memory = [f"{format_size(available)} of {format_size(total)} memory available"] if total else []
        return f"the machine had {', '.join([*memory, *free])}" if self.machine else ""


class FormatResult(_Value):
    """One delivered format.

    Attributes:
        digest: Artifact from which the folder was delivered.
        size_bytes: Size of all files of the folder; several with one content count once.
        reduction_percent: Reduction of the size against the unquantized merged model; negative if larger. None for an adapter alone.
        status: ``passed``, ``failed``, ``not_run`` (this machine cannot run it) or ``not_validated``.
        mean_kl: Mean KL against the reference, nats per token.
        top1_agreement: Share of positions where output and reference rank the same token, class or place first, 0 to 1.
        relative_error: For embeddings and scores, which have no KL: difference from the reference as a share of its values.
        cosine_distance: For embeddings: mean of 1 - cos between output and reference.
        decode_tokens_per_second: Speed of generation, median of several rounds.
        decode_spread_percent: Width of the range of most rounds (10th to 90th percentile), in percent of the median; None
            for a single round.
        decode_stable: Whether the spread is small enough to rely on the figure (see ``slipway.validation.speed.Speed``).
        decode_speedup: Speed as a multiple of the reference's, timed in turn with it; None if it was not timed in turn or is not
            stable.
        inference_speed_ms: Time of one forward pass over a prompt (prefill), median of several rounds.
        inference_speed_spread_percent: As ``decode_spread_percent``.
        inference_speed_stable: As ``decode_stable``.
        inference_speedup: As ``decode_speedup``.
        memory_usage_mb: Peak memory while the model was measured, 10^6 bytes.
        requested: Format that was asked for, if this one is delivered in its place; otherwise empty.
        replaced: If the output was made again because it failed validation: what was asked for, what was tried, and why; otherwise empty.
    """

    digest: str
    size_bytes: int
    reduction_percent: float | None = None
    status: str = "not_validated"
    mean_kl: float | None = None
    top1_agreement: float | None = None
    relative_error: float | None = None
    cosine_distance: float | None = None
    decode_tokens_per_second: float | None = None
    decode_spread_percent: float | None = None
    decode_stable: bool = False
    decode_speedup: float | None = None
    inference_speed_ms: float | None = None
    inference_speed_spread_percent: float | None = None
    inference_speed_stable: bool = False
    inference_speedup: float | None = None
    memory_usage_mb: float | None = None
    requested: str = ""
    replaced: str = ""


class FailedFormat(_Value):
    """One format that was requested and not made.

    Attributes:
        task: Task that should have made it.
        state: ``failed``, ``not_run`` (the format does not support models of this kind), ``skipped`` (one of its inputs was not made) or ``cancelled``.
        reason: Stable reason of the failure of this task or of the task it needs; empty if cancelled.
        error_message: The fault with its remedy.
    """

    task: str
    state: str
    reason: str = ""
    error_message: str = ""


class PublishedResult(_Value):
    """One place where an export was published, or should have been.

    Attributes:
        destination: Its address as the configuration names it.
        address: Where it is, pinned by a digest if the destination has one; empty if publishing failed.
        sent_bytes: Bytes of files that were sent.
        kept_bytes: Bytes of files that were there already.
        details: What only this kind of destination has.
        reason: Stable reason of a failure; empty if it is published.
        error_message: The fault with its remedy; empty if it is published.
    """

    destination: str
    address: str = ""
    sent_bytes: int = 0
    kept_bytes: int = 0
    details: dict[str, Any] = {}
    reason: str = ""
    error_message: str = ""


class ExportResult(_Value):
    """The result of an export.

    Attributes:
        export_id: Digest of configuration and sources.
        timestamp: Time at which the export was first created, UTC.
        success: Whether every requested format was made, or a wider level in its place (``validation.on_failure: fallback``), and no output
            failed validation other than those that ``keep`` delivers; and it was published wherever the configuration says.
        paths: Folder of each produced format, absolute.
        output_directory: Folder that holds them; empty if nothing was delivered.
        formats: Details of each produced format.
        requested: Every requested format, in the plan's order.
        failed: The requested formats that were not made, with the cause.
        original_size_bytes: Size of the unquantized merged model.
        optimized_size_bytes: Size of the smallest produced format; an adapter alone does not count.
        size_reduction_percent: Reduction from the merged model to the smallest format.
        inference_speed_ms: Time of one forward pass over a prompt by the fastest produced format; None if no format's figure was stable.
        memory_usage_mb: Peak memory during measurement of the produced format that needs least, 10^6 bytes.
        validation_passed: Whether validation passed; None if nothing was validated.
        plain: Whether a model was exported as it is, without an adapter; checks of the adapter do not apply then.
        base_match: Whether the adapter was trained on this base model, with the evidence; the verdict is green or amber, and
            amber is not a failure.
        multi_token_head: How often the model accepts what its multi-token head drafts; None if it has no such head, or nothing was validated.
        validation_report_path: ``report.html``, or ``report.json`` if no page could be made; empty if nothing was delivered.
        reason: Stable reason of a failure; empty on success.
        error_message: Why the export failed, with the remedy; empty on success.
        warnings: Warnings for the user.
        attempts: Every attempt of every task.
        published: The destinations of the configuration, in its order; empty if there are none, if the export failed, and in ``report.json``,
            which is published itself.
    """

    export_id: str
    timestamp: datetime
    success: bool
    paths: dict[str, str] = {}
    output_directory: str = ""
    formats: dict[str, FormatResult] = {}
    requested: tuple[str, ...] = ()
    failed: dict[str, FailedFormat] = {}
    original_size_bytes: int | None = None
    optimized_size_bytes: int | None = None
    size_reduction_percent: float | None = None
    inference_speed_ms: float | None = None
    memory_usage_mb: float | None = None
    validation_passed: bool | None = None
    plain: bool = False
    base_match: BaseMatch | None = None
    multi_token_head: MultiTokenHead | None = None
    validation_report_path: str = ""
    reason: str = ""
    error_message: str = ""
    warnings: tuple[str, ...] = ()
    attempts: tuple[AttemptResult, ...] = ()
    published: tuple[PublishedResult, ...] = ()

    def require(self) -> ExportResult:
        """Return this result if the export succeeded.

        Raises:
            ModelExportError: :attr:`reason` and :attr:`error_message`; :class:`~slipway.errors.ValidationError` for outputs that failed
                validation, and for other reasons the class of errors whose usual one it is.
        """
        if not self.success:
            raise error_of_reason(self.reason, self.error_message or "the export failed")
        return self

    def __repr__(self) -> str:
        outcome = "succeeded" if self.success else f"failed: {self.reason}"
        made = f"{len(self.formats)} of {counted(len(self.requested) or len(self.formats), 'format')} made"
        warnings = f", {counted(len(self.warnings), 'warning')}" if self.warnings else ""
        each = [
            f"{name} {format_size(entry.size_bytes)} {entry.status.replace('_', ' ')}"
            for name, entry in self.formats.items()
        ]
        each += [f"{name} {failed.state.replace('_', ' ')}" for name, failed in self.failed.items()]
        return three_lines(
            f"ExportResult {self.export_id}: {outcome}, {made}{warnings}",
            named_few(each) or "nothing was made",
            self.error_message or self.output_directory or "nothing was delivered",
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Show the first page of the report; without a report, the text."""
        page = self._first_page()
        if not page:
            return preformatted(repr(self))
        return framed(page, title=f"Report of {self.export_id}", height_rem=26 + 2.0 * len(self.formats))

    def _first_page(self) -> str:
        """Return the report up to the end of its first page; empty if there is none, or if it is another export's."""
        if not self.validation_report_path.endswith(".html"):
            return ""
        try:
            with Path(self.validation_report_path).open(encoding="utf-8") as file:
                text = file.read(_MOST_REPORT_CHARACTERS)
        except (OSError, ValueError):
            return ""
        first, end, _ = text.partition(_END_OF_FIRST_PAGE)
        return f"{first}{end}</body></html>" if end and f"<code>{self.export_id}</code>" in first else ""


def requested_format(task: pb.Task) -> str:
    """Return the format for which a task was planned; it may deliver another one."""
    return str(task.requested_format or task.format)


def replacements(export: pb.Export) -> dict[str, str]:
    """Return, for each format that was made again, what was asked for, what was tried, and why."""
    texts = {}
    for task in export.tasks:
        rejected = [attempt for attempt in task.attempts if _is_rejected(attempt)]
        if task.format == VALIDATION or not rejected:
            continue
        first = failure_of_status(rejected[0].error)
        output = task.format or first.about.get("output", "")  # another task converts what this one rounds
        asked = requested_format(task) or output
        tried = [f"{attempt.note} ({attempt.rule})" for attempt in task.attempts[1:] if attempt.note]
        delivered = f"delivered as {output}" if output != asked else "delivered under the same name"
        outcome = delivered if task.state == pb.TASK_STATE_SUCCEEDED else "not delivered"
        said = first.message.removeprefix(failure_prefix(asked)).removeprefix(warning_prefix(asked))
        judged = "failed validation" if first.reason == REJECTED else "passed with a warning"
        texts[output] = f"{asked} {judged} ({said}) and was made again: {'; '.join(tried)}; {outcome}"
    return texts


def _is_rejected(attempt: pb.Attempt) -> bool:
    return attempt.HasField("error") and failure_of_status(attempt.error).reason in (REJECTED, TOO_COARSE)

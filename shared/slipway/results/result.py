"""The answer of an export: what was made, where it is, how good it is, and how it came about."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from slipway.base_match import BaseMatch


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class AttemptResult(_Value):
    """One try of one stage.

    Attributes:
        task: Task within the export, such as ``quantize-onnx-int8``.
        stage: Stage the task runs.
        number: Counts from 1 within the task.
        outcome: ``succeeded``, ``failed``, ``cancelled`` …
        params: Parameters of this attempt.
        rule: Recovery rule that led to it; empty for the first.
        reused: The result existed already and was taken from the store.
        worker: Worker that ran it.
        reason: Stable reason of a failure; empty otherwise.
        error_message: What went wrong, with the remedy.
        duration_seconds: From start to end; None while unknown.
        peak_memory_bytes: Largest memory of the stage's process; 0 when not measured.
        machine: What the machine had left when the attempt failed, in bytes: ``memory_available_bytes``,
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
    machine: dict[str, int] = {}

    @property
    def machine_left(self) -> str:
        """What the machine had left when the attempt failed, for people; empty when that is not known."""
        free = [
            f"{count / 1e9:.1f} GB free for {name.removesuffix('_free_bytes')}"
            for name, count in sorted(self.machine.items())
            if name.endswith("_free_bytes")
        ]
        available, total = (self.machine.get(f"memory_{name}_bytes", 0) / 1e9 for name in ("available", "total"))
        memory = [f"{available:.1f} of {total:.1f} GB memory available"] if total else []
        return f"the machine had {', '.join([*memory, *free])}" if self.machine else ""


class FormatResult(_Value):
    """One delivered format.

    Attributes:
        digest: Artifact the folder was delivered from.
        size_bytes: All files of the folder.
        reduction_percent: Against the unquantized merged model; negative when larger.
        status: ``passed``, ``failed``, ``not_run`` (this machine cannot run it) or ``not_validated``.
        mean_kl: Against the reference, nats per token.
        top1_agreement: Share of positions where both rank the same token, class or place first, 0 to 1.
        relative_error: Of embeddings and scores, which have no KL: difference to the reference as a share of its values.
        cosine_distance: Of embeddings: mean of 1 - cos to the reference's.
        decode_tokens_per_second: Speed of generation, median of several rounds.
        decode_spread_percent: Width of the range that most rounds lie in (10th to 90th percentile), in percent of the median; None
            of a single round.
        decode_stable: Whether that is little enough to rely on (see ``slipway.validation.speed.Speed``).
        decode_speedup: How many times as fast as the reference, timed in turn with it; None where it was not, or where that was
            not stable.
        inference_speed_ms: Time of one forward pass over a prompt (prefill), median of several rounds.
        inference_speed_spread_percent: As ``decode_spread_percent``.
        inference_speed_stable: As ``decode_stable``.
        inference_speedup: As ``decode_speedup``.
        memory_usage_mb: Peak memory while the model was measured, 10^6 bytes.
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


class FailedFormat(_Value):
    """One format that was asked for and not made.

    Attributes:
        task: Task that should have made it.
        state: ``failed``, ``not_run`` (the format is not made of models of this kind), ``skipped`` (something it needs was not made) or ``cancelled``.
        reason: Stable reason of the failure, its own or that of the task it waited for; empty when cancelled.
        error_message: What went wrong, with the remedy.
    """

    task: str
    state: str
    reason: str = ""
    error_message: str = ""


class ExportResult(_Value):
    """The answer of an export.

    Attributes:
        export_id: Digest of configuration and sources.
        timestamp: When the export was first created, UTC.
        success: Whether everything asked for was made and nothing failed validation.
        paths: Folder of each produced format, absolute.
        output_directory: Folder that holds them; empty when nothing was delivered.
        formats: Details of each produced format.
        requested: Every format that was asked for, in the plan's order.
        failed: Of those, the ones that were not made, and why.
        original_size_bytes: The merged model, unquantized.
        optimized_size_bytes: The smallest produced format.
        size_reduction_percent: How much smaller that is.
        inference_speed_ms: One forward pass over a prompt by the fastest produced format; None where no format's figure was stable.
        memory_usage_mb: Peak memory of the produced format that needs least, while it was measured, 10^6 bytes.
        validation_passed: None when nothing was validated.
        plain: Whether a model was exported as it is, without an adapter; checks of the adapter do not apply then.
        base_match: Whether the base model is the one the adapter was trained on, and what speaks for it; its verdict is green or
            amber, and amber is no failure.
        validation_report_path: ``report.html``; empty when nothing was delivered.
        reason: Stable reason of a failure; empty on success.
        error_message: Why the export failed, with the remedy; empty on success.
        warnings: What the user should know.
        attempts: Every attempt of every stage.
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
    validation_report_path: str = ""
    reason: str = ""
    error_message: str = ""
    warnings: tuple[str, ...] = ()
    attempts: tuple[AttemptResult, ...] = ()

"""Runs one output and turns what came out into its result."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipway.formats.registry import merged_output
from slipway.validation.findings import Engine, GreedyComparison, Limits, OutputStatus, OutputValidation, ShapeCase
from slipway_validate import folders
from slipway_validate.cases import native_case
from slipway_validate.judging import explain
from slipway_validate.judging.compare import CaseLogits, compare_case, compare_greedy, compare_windows, load_logits
from slipway_validate.judging.judge import Judge
from slipway_validate.judging.limits import coarser, own_level
from slipway_validate.numerics import (
    Ints,
    adapter_strength,
    finite,
    logit_scale,
    perplexity,
    perplexity_of,
    window_losses,
)
from slipway_validate.protocol.messages import BASE_LOGITS_FILE, LOGITS_FILE, RunResult, RunSpec

MERGED = merged_output()
"""Name of the output that is the merged model; others are compared with it."""


@dataclass(frozen=True)
class ReferenceRun:
    """The reference's logits and figures, that every output is compared with.

    Attributes:
        folder: Its runner's folder.
        result: What its runner answered.
        tokens: The windows, (N, T).
        merged_level: Row of the limits for what the merge writes.
        perplexity: Its perplexity.
        base_perplexity: Without the adapter.
        gain_per_window: Nats per token that the adapter saves, by window.
        adapter_effect_kl: Mean KL(reference ‖ base), nats per token.
        logit_scale: Root mean square of its logits, at least 1.
        noise: Its arithmetic noise, logits.
    """

    folder: Path
    result: RunResult
    tokens: Ints
    merged_level: str
    perplexity: float | None = None
    base_perplexity: float | None = None
    gain_per_window: tuple[float | None, ...] = ()
    adapter_effect_kl: float | None = None
    logit_scale: float = 1.0
    noise: float | None = None

    def completed(self, *, noise: float | None) -> ReferenceRun:
        """This run with the figures that its logits give."""
        logits, base = self.logits, self.base_logits
        losses, base_losses = window_losses(logits, self.tokens), window_losses(base, self.tokens)
        return replace(
            self,
            perplexity=perplexity_of(losses),
            base_perplexity=perplexity_of(base_losses),
            gain_per_window=tuple(finite(gain) for gain in base_losses - losses),
            adapter_effect_kl=compare_windows(logits, base).mean_kl,
            logit_scale=logit_scale(logits),
            noise=noise,
        )

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """(N, T, V)."""
        return load_logits(self.folder / LOGITS_FILE)

    @property
    def base_logits(self) -> npt.NDArray[np.float32]:
        """Without the adapter, (N, T, V)."""
        return load_logits(self.folder / BASE_LOGITS_FILE)


@dataclass(frozen=True)
class MergedRun:
    """The merged model's logits, and its result."""

    folder: Path
    validation: OutputValidation


class Evaluator:
    """Makes the result of an output from what its runner wrote.

    Args:
        reference: What to compare with; None when outputs are only to run.
        limits: Limits by level.
        decode: Token ids to text, for the example of a continuation.
    """

    def __init__(
        self, reference: ReferenceRun | None, limits: Mapping[str, Limits], *, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._reference = reference
        self._limits = limits
        self._decode = decode
        self.merged: MergedRun | None = None

    def evaluate(
        self, name: str, folder: Path, *, spec: RunSpec, result: RunResult, run_folder: Path
    ) -> OutputValidation:
        """The result of one output; its logits are removed unless it is the merged model."""
        started = self._started(name, folder, result)
        if result.status != "done":
            return unusable(started, result)
        reference = self._reference
        if reference is None:
            exact = self._limits["float32"]
            return self._verdict(started, result, Judge(exact, exact, logit_scale=1.0, noise=None))
        if result.vocabulary != reference.result.vocabulary:
            message = f"its logits have {result.vocabulary} values, the reference's {reference.result.vocabulary}"
            return unusable(started, RunResult(status="failed", reason="VALIDATION_IMPOSSIBLE", message=message))
        measured = self._measured(started, reference, spec=spec, result=result, run_folder=run_folder)
        own = own_level(measured.engine)
        limits = self._limits[coarser(own, reference.merged_level)]
        effect = reference.adapter_effect_kl
        judge = Judge(
            limits, self._limits[own], logit_scale=reference.logit_scale, noise=reference.noise, effect=effect
        )
        measured = measured.model_copy(update={"limits": limits, "notes": judge.notes()})
        verdict = self._verdict(measured, result, judge)
        if name == MERGED:
            self.merged = MergedRun(run_folder, verdict)
        else:
            shutil.rmtree(run_folder)
        return verdict

    def _started(self, name: str, folder: Path, result: RunResult) -> OutputValidation:
        format_name, level = folders.format_and_level(name)
        return OutputValidation(
            name=name,
            format=format_name,
            level=level,
            status=OutputStatus.NOT_RUN,
            size_bytes=folders.size_bytes(folder),
            engine=result.engine,
            memory=result.memory,
            load_seconds=result.load_seconds,
        )

    def _measured(
        self, output: OutputValidation, reference: ReferenceRun, *, spec: RunSpec, result: RunResult, run_folder: Path
    ) -> OutputValidation:
        own = load_logits(run_folder / LOGITS_FILE)
        return output.model_copy(
            update={
                "to_reference": compare_windows(reference.logits, own),
                "to_base": compare_windows(reference.base_logits, own),
                "to_merged": compare_windows(load_logits(self.merged.folder / LOGITS_FILE), own)
                if self.merged
                else None,
                "adapter_strength": adapter_strength(reference.base_logits, reference.logits, own),
                "perplexity": perplexity(own, reference.tokens),
                "reference_perplexity": reference.perplexity,
                "greedy": self._greedy(reference, spec=spec, result=result),
                "cases": self._cases(
                    CaseLogits(run_folder, own, reference.logits), reference, spec=spec, result=result
                ),
            }
        )

    def _greedy(self, reference: ReferenceRun, *, spec: RunSpec, result: RunResult) -> GreedyComparison | None:
        theirs, ours = reference.result.continuations, result.continuations
        compared = compare_greedy(theirs, ours)
        if compared is None:
            return None
        return compared.model_copy(
            update={
                "example_prompt": self._decode(spec.prompts[0]),
                "example_reference": self._decode(theirs[0]),
                "example_output": self._decode(ours[0]),
            }
        )

    def _cases(
        self, where: CaseLogits, reference: ReferenceRun, *, spec: RunSpec, result: RunResult
    ) -> tuple[ShapeCase, ...]:
        engine = result.engine or Engine(runtime=spec.runtime)
        cases = list(spec.cases)
        if engine.native_dtype != engine.compute_dtype:
            cases.append(native_case(*reference.tokens.shape))
        return tuple(compare_case(case, where, skipped=result.skipped_cases.get(case.name, "")) for case in cases)

    def _verdict(self, output: OutputValidation, result: RunResult, judge: Judge) -> OutputValidation:
        checked = output.model_copy(update={"checks": judge.checks(output, non_finite=result.non_finite)})
        explanation, remedy = explain.of_checks(
            checked, merged=self.merged.validation if self.merged else None, where=result.first_non_finite
        )
        status = OutputStatus.FAILED if checked.failed_checks else OutputStatus.PASSED
        return checked.model_copy(update={"status": status, "explanation": explanation, "remedy": remedy})


def unusable(output: OutputValidation, result: RunResult) -> OutputValidation:
    """The result of an output that was not run, or could not be."""
    if result.status == "not_run":
        return output.model_copy(update={"status": OutputStatus.NOT_RUN, "status_reason": result.message})
    explanation, remedy = explain.of_failure(result.reason, result.message)
    return output.model_copy(
        update={
            "status": OutputStatus.FAILED,
            "status_reason": result.reason,
            "explanation": explanation,
            "remedy": remedy,
        }
    )

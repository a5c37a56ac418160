"""Turn what the runner of an output wrote into the output's result."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slipway.formats.registry import merged_output
from slipway.models.families import DECODER, Family
from slipway.validation.comparisons import GreedyComparison, ShapeCase
from slipway.validation.findings import OutputStatus, OutputValidation
from slipway.validation.limit_overrides import Limits
from slipway.validation.speed import Engine
from slipway.validation.survival import AdapterSurvival
from slipway_validate import folders
from slipway_validate.cases import native_case
from slipway_validate.judging import explain, survival, texts
from slipway_validate.judging.answers import Scorer
from slipway_validate.judging.compare import CaseResults, compare_case, compare_greedy, load_logits
from slipway_validate.judging.continuations import compare_long
from slipway_validate.judging.judge import Judge, Rule
from slipway_validate.judging.limits import coarser, own_level
from slipway_validate.judging.measures import choose_measure, distance_of
from slipway_validate.judging.reference_run import ReferenceRun
from slipway_validate.judging.together import Together, compare_together
from slipway_validate.protocol.messages import LOGITS_FILE, RunResult, RunSpec

MERGED = merged_output()
"""Name of the output that is the merged model; others are compared with it."""


@dataclass(frozen=True)
class MergedRun:
    """The merged model's logits, and its result."""

    folder: Path
    validation: OutputValidation


class Evaluator:
    """Makes the result of an output from the files of its runner.

    Args:
        reference: The run to compare with; None if outputs are only run.
        family: The model's family.
        limits: Limits by level.
        decode: Function from token ids to text, for the example of a continuation.
        survival: Function that returns what the stored weights of each output hold of the adapter, by the output's name.
        scorer: Scores the answers to the user's test inputs; None if there are none.
        threads: Threads that compare results.
    """

    def __init__(
        self,
        reference: ReferenceRun | None,
        family: Family,
        limits: Mapping[str, Limits],
        *,
        decode: Callable[[Sequence[int]], str],
        survival: Callable[[], Mapping[str, AdapterSurvival]] = dict,
        scorer: Scorer | None = None,
        threads: int = 1,
    ) -> None:
        self._reference = reference
        self._survival = survival
        self._threads = threads
        self._family = family
        self._limits = limits
        self._decode = decode
        self._scorer = scorer
        self.merged: MergedRun | None = None

    def evaluate(
        self, name: str, folder: Path, *, spec: RunSpec, result: RunResult, run_folder: Path
    ) -> OutputValidation:
        """Return the result of one output; remove its logits unless it is the merged model."""
        output = begin_result(name, folder, result)
        if result.status != "done":
            return result_not_run(output, result)
        reference = self._reference
        if reference is None:
            exact = self._limits["float32"]
            judge = Judge(Rule(exact, exact, choose_measure(self._family.comparison, width=result.vocabulary)))
            return self._verdict(output, result, judge)
        if result.vocabulary != reference.result.vocabulary:
            message = f"its results have {result.vocabulary} values, the reference's {reference.result.vocabulary}"
            return result_not_run(output, RunResult(status="failed", reason="VALIDATION_IMPOSSIBLE", message=message))
        measured = self._measured(output, reference, spec=spec, result=result, run_folder=run_folder)
        rule = self._rule(measured, reference)
        judge = Judge(rule, adapter=reference.with_adapter)
        found = self._survival().get(name)
        measured = measured.model_copy(
            update={
                "limits": rule.limits,
                "survival": None if found is None else survival.judged(found, rule.limits),
                "notes": (*judge.notes(), *survival.notes(found), *texts.notes(result.texts)),
            }
        )
        verdict = self._verdict(measured, result, judge)
        if name == MERGED:
            self.merged = MergedRun(run_folder, verdict)
        else:
            shutil.rmtree(run_folder)
        return verdict

    def _rule(self, output: OutputValidation, reference: ReferenceRun) -> Rule:
        own = own_level(output.engine)
        return Rule(
            self._limits[coarser(own, reference.merged_level)],
            self._limits[own],
            reference.measure,
            logit_scale=reference.logit_scale,
            noise=reference.noise,
            effect=distance_of(reference.adapter_effect),
            values=reference.logits.size,
        )

    def _measured(
        self, output: OutputValidation, reference: ReferenceRun, *, spec: RunSpec, result: RunResult, run_folder: Path
    ) -> OutputValidation:
        own = load_logits(run_folder / LOGITS_FILE)
        others = Together(
            reference=reference.logits,
            base=reference.base_logits if reference.with_adapter else None,
            merged=load_logits(self.merged.folder / LOGITS_FILE) if self.merged else None,
            labels=reference.samples.labels,
        )
        return output.model_copy(
            update={
                **compare_together(own, others, reference.measure, threads=self._threads),
                "reference_perplexity": reference.perplexity,
                "greedy": self._greedy(reference, spec=spec, result=result),
                "continuation": compare_long(
                    reference.result.long, result.long, folders=(reference.folder, run_folder), decode=self._decode
                ),
                "texts": result.texts,
                "answers": self._scorer.compare(reference.result.answers, result.answers) if self._scorer else None,
                "cases": self._cases(run_folder, reference, spec=spec, result=result),
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
        self, folder: Path, reference: ReferenceRun, *, spec: RunSpec, result: RunResult
    ) -> tuple[ShapeCase, ...]:
        engine = result.engine or Engine(runtime=spec.runtime)
        cases = list(spec.cases)
        if engine.native_dtype != engine.compute_dtype:
            cases.append(native_case(self._family, *reference.samples.tokens.shape))
        where = CaseResults(folder, reference.folder, reference.measure)
        own = reference.result.engine
        # A decoder's graph takes positions, so left padding does not shift them as it may in transformers' own models.
        alike = own is None or own.runtime == engine.runtime or self._family != DECODER
        skipped = {**result.skipped_cases, **(reference.unsteady_cases if alike else {})}
        with ThreadPoolExecutor(self._threads) as pool:
            return tuple(pool.map(lambda case: compare_case(case, where, skipped=skipped.get(case.name, "")), cases))

    def _verdict(self, output: OutputValidation, result: RunResult, judge: Judge) -> OutputValidation:
        checked = output.model_copy(update={"checks": judge.checks(output, non_finite=result.non_finite)})
        explanation, remedy = explain.explain_checks(
            checked, merged=self.merged.validation if self.merged else None, where=result.first_non_finite
        )
        status = OutputStatus.FAILED if checked.failed_checks else OutputStatus.PASSED
        return checked.model_copy(update={"status": status, "explanation": explanation, "remedy": remedy})


def begin_result(name: str, folder: Path, result: RunResult) -> OutputValidation:
    """Return an output's result with the facts known before any comparison."""
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


def result_not_run(output: OutputValidation, result: RunResult) -> OutputValidation:
    """Return the result of an output that was not or could not be run."""
    if result.status == "not_run":
        return output.model_copy(update={"status": OutputStatus.NOT_RUN, "status_reason": result.message})
    explanation, remedy = explain.explain_failure(result.reason, result.message)
    return output.model_copy(
        update={
            "status": OutputStatus.FAILED,
            "status_reason": result.reason,
            "explanation": explanation,
            "remedy": remedy,
        }
    )

"""Turn what the runner of an output wrote into the output's result."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from slipway.formats.registry import merged_output
from slipway.levels import LEVELS
from slipway.model.families import DECODER, Family
from slipway.model.folder import ModelFolder
from slipway.validation.comparisons import Check, GreedyComparison, ShapeCase
from slipway.validation.findings import OutputStatus, OutputValidation
from slipway.validation.pictures import PictureComparison, Sense
from slipway.validation.speed import Engine
from slipway.validation.survival import AdapterSurvival
from slipway.validation.verdicts import Limits, kept_share
from slipway_validate import folders
from slipway_validate.answers.scores import Scorer
from slipway_validate.cases import native_case
from slipway_validate.folders import has_separate_adapter
from slipway_validate.judging import explain, parts, pictures, survival, texts
from slipway_validate.judging.compare import (
    CaseResults,
    OtherModels,
    compare_case,
    compare_greedy,
    compare_long,
    compare_together,
    load_logits,
)
from slipway_validate.judging.distances import choose_measure, coarser, distance_of, own_level
from slipway_validate.judging.fit import fit_checks, fit_verdict
from slipway_validate.judging.judge import Against, Judge, Rule
from slipway_validate.judging.part_tensors import name_other_tensors
from slipway_validate.judging.routing import compare_routes, routing_notes
from slipway_validate.judging.yardsticks import (
    HALVES,
    STATIC,
    Measured,
    ReferenceRun,
    halves_encoder,
    is_own_code,
    results_rounding,
    rounding_of,
)
from slipway_validate.protocol.messages import LOGITS_FILE, RunResult, RunSpec
from slipway_validate.protocol.pictures import Looked

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
        measured: Function that returns what the outputs are measured with.
        scorer: Scores the answers to the user's test inputs; None if there are none.
        threads: Threads that compare results.
        base: The base, whose parts beside the text an output in transformers' form must have; None to compare no names.
        expected_senses: What the reference was asked to compute beside text.
        elsewhere: Whether the text is built in, so that the fine-tune was not made for it.
    """

    def __init__(
        self,
        reference: ReferenceRun | None,
        family: Family,
        limits: Mapping[str, Limits],
        *,
        decode: Callable[[Sequence[int]], str],
        survival: Callable[[], Mapping[str, AdapterSurvival]] = dict,
        measured: Callable[[], Measured] = Measured,
        scorer: Scorer | None = None,
        threads: int = 1,
        base: ModelFolder | None = None,
        expected_senses: Sequence[Sense] = (),
        elsewhere: bool = False,
    ) -> None:
        self._reference = reference
        self._elsewhere = elsewhere
        runs = {each: reference.behind(each) for each in Sense} if reference else {}
        self._behind = {each: run for each, run in runs.items() if run}
        adapted = {each: distance_of(run.adapter_effect) for each, run in self._behind.items()}
        self.beside = pictures.describe_effects(
            reference.folder if reference else None, adapted, expected=expected_senses
        )
        self._survival = survival
        self._yardsticks = measured
        self._threads = threads
        self._base = base
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
        if self._base is not None and is_own_code(name, folder) and not has_separate_adapter(name):
            output = output.model_copy(update={"missing": parts.find_missing(self._base, folder)})
        reference = self._reference
        if reference is None:
            rule = Rule(self._limits["float32"], choose_measure(self._family.comparison, width=result.vocabulary))
            return self._verdict(output, result, rule, adapter=False)
        if result.vocabulary != reference.result.vocabulary:
            message = f"its results have {result.vocabulary} values, the reference's {reference.result.vocabulary}"
            return result_not_run(output, RunResult(status="failed", reason="VALIDATION_IMPOSSIBLE", message=message))
        measured = self._compare_results(output, reference, spec=spec, result=result, run_folder=run_folder)
        rule, unjudged = self._rule(measured, reference, folder, self._yardsticks())
        held, effect = self._survival().get(name), rule.effect
        behind, beside = dict[str, PictureComparison](), list[Check]()
        for sense in self.beside:
            compared, checks = self._compare_behind(sense, measured, folder, run_folder=run_folder)
            if self._base and is_own_code(name, folder) and not all(each.passed for each in checks):
                blamed = name_other_tensors(self._base, folder, held, adapter=reference.with_adapter)
                compared = compared.model_copy(update={"blamed": blamed})
            behind[sense.value] = compared
            beside += checks
        findings = None if held is None else survival.add_faults(held, rule.limits)
        measured = measured.model_copy(
            update={
                "limits": rule.limits,
                "kept": kept_share(distance_of(measured.to_reference), effect),
                "level_cost": _level_cost(measured, self._yardsticks()),
                **behind,
                "survival": findings,
                "notes": (
                    *survival.notes(findings, rule.limits),
                    *texts.notes(result.texts),
                    *routing_notes(measured.routing),
                ),
            }
        )
        verdict = self._verdict(
            measured, result, rule, adapter=reference.with_adapter, unjudged=unjudged, beside=tuple(beside)
        )
        if name == MERGED:
            self.merged = MergedRun(run_folder, verdict)
        else:
            shutil.rmtree(run_folder)
        return verdict

    def _rule(
        self, output: OutputValidation, reference: ReferenceRun, folder: Path, measured: Measured
    ) -> tuple[Rule, str]:
        """Return the limits of an output, and why its results are not compared with a yardstick; empty if they are."""
        own = own_level(output.engine)
        rounding, halved = rounding_of(output.name, folder), halves_encoder(output.name, folder)
        computes = output.engine.compute_dtype if output.engine else ""
        if not rounding and computes in HALVES:
            rounding, halved = results_rounding(computes), False
        noise = None if rounding == STATIC else measured.noise(rounding, halves_encoder=halved)
        # A set, as rounding to one type twice changes nothing more.
        from_reference = measured.cost_together({own, reference.merged_level})
        yardstick, cost, unjudged = _choose_yardstick(output, measured, from_reference=from_reference, folder=folder)
        if noise is None and yardstick is not None:
            unjudged = (
                "its ranges of activations are not read, so its results were not compared with its own weights"
                if rounding == STATIC
                else "the noise of its arithmetic was not measured"
            )
        rule = Rule(
            self._limits[coarser(own, reference.merged_level)],
            reference.measure,
            effect=distance_of(reference.adapter_effect),
            yardstick=yardstick,
            noise=noise,
            cost=cost,
            from_reference=from_reference,
            values=reference.logits.size,
            measured=reference.logits[: measured.windows].size if measured.windows else reference.logits.size,
            exact=own == "float32" and not rounding and yardstick is not None and not cost and reference.knows_noise,
            logit_scale=reference.logit_scale,
            arithmetic=reference.noise,
            elsewhere=self._elsewhere,
        )
        return rule, unjudged

    def _compare_results(
        self, output: OutputValidation, reference: ReferenceRun, *, spec: RunSpec, result: RunResult, run_folder: Path
    ) -> OutputValidation:
        own = load_logits(run_folder / LOGITS_FILE)
        others = OtherModels(
            reference=reference.logits,
            base=reference.base_logits if reference.with_adapter else None,
            merged=load_logits(self.merged.folder / LOGITS_FILE) if self.merged else None,
            labels=reference.samples.labels,
        )
        return output.model_copy(
            update={
                **compare_together(own, others, reference.measure, threads=self._threads),
                "to_stored": self._yardsticks().compare_stored(output.name, own, reference.measure),
                "reference_perplexity": reference.perplexity,
                "greedy": self._compare_greedy(reference, spec=spec, result=result),
                "continuation": compare_long(
                    reference.result.long, result.long, folders=(reference.folder, run_folder), decode=self._decode
                ),
                "texts": result.texts,
                "routing": compare_routes(reference.folder, run_folder),
                "answers": self._scorer.compare(reference.result.answers, result.answers) if self._scorer else None,
                "cases": self._compare_cases(run_folder, reference, spec=spec, result=result),
            }
        )

    def _compare_behind(
        self, sense: Sense, output: OutputValidation, folder: Path, *, run_folder: Path
    ) -> tuple[PictureComparison, tuple[Check, ...]]:
        """Compare an output's results behind pictures or sound as those on text; return the figures with their verdicts, and the checks."""
        reference, measured = self._behind.get(sense), self._yardsticks().behind.get(sense) or Measured()
        begun = pictures.begin_comparison(self.beside[sense], Looked.read(run_folder, sense))
        if begun.not_run or begun.failed or reference is None:
            return begun, pictures.check_unreadable(begun)
        own = load_logits(run_folder / sense / LOGITS_FILE)
        if own.shape != reference.logits.shape:
            failed = (
                f"its results {sense.place} have the shape {own.shape}, and the reference's {reference.logits.shape}"
            )
            begun = begun.model_copy(update={"failed": failed})
            return begun, pictures.check_unreadable(begun)
        file = self.merged.folder / sense / LOGITS_FILE if self.merged else None
        others = OtherModels(
            reference=reference.logits,
            base=reference.base_logits if reference.with_adapter else None,
            merged=load_logits(file) if file is not None and file.is_file() else None,
            labels=None,
        )
        figures = compare_together(own, others, reference.measure, threads=self._threads)
        figures["to_stored"] = measured.compare_stored(output.name, own, reference.measure)
        alike = output.model_copy(update={**figures, "checks": ()})
        rule, unjudged = self._rule(alike, reference, folder, measured)
        rule = replace(rule, place=sense.place)
        judge = Judge(rule, adapter=reference.with_adapter)
        alike = alike.model_copy(
            update={
                "kept": kept_share(distance_of(alike.to_reference), rule.effect),
                "level_cost": _level_cost(alike, measured),
                "checks": (*judge.faithful_checks(alike), *fit_checks(alike, rule.fit)),
            }
        )
        faithful = explain.faithful_verdict(
            alike, yardstick=rule.yardstick or "", unjudged=unjudged, base_limit=rule.faithful_limit, where=""
        )
        verdicts = {"kept": alike.kept, "level_cost": alike.level_cost, "fit": fit_verdict(alike, rule.fit)}
        compared = begun.model_copy(update={**figures, **verdicts, "faithful": faithful})
        return compared, pictures.name_checks(alike.checks, sense)

    def _compare_greedy(self, reference: ReferenceRun, *, spec: RunSpec, result: RunResult) -> GreedyComparison | None:
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

    def _compare_cases(
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

    def _verdict(
        self,
        output: OutputValidation,
        result: RunResult,
        rule: Rule,
        *,
        adapter: bool,
        unjudged: str = "",
        beside: tuple[Check, ...] = (),
    ) -> OutputValidation:
        judge = Judge(rule, adapter=adapter)
        checked = output.model_copy(
            update={
                "checks": (*judge.checks(output, non_finite=result.non_finite), *beside),
                "notes": (*output.notes, *(judge.notes() if self._reference else ())),
            }
        )
        base_limit, where = rule.faithful_limit, result.first_non_finite
        faithful = explain.faithful_verdict(
            checked, yardstick=rule.yardstick or "", unjudged=unjudged, base_limit=base_limit, where=where
        )
        fit = pictures.worse(fit_verdict(checked, rule.fit), checked.pictures, checked.sound)
        checked = checked.model_copy(update={"faithful": faithful, "fit": fit})
        explanation, remedy = explain.explain_checks(checked, where=where, base_limit=base_limit)
        status = OutputStatus.FAILED if checked.failed_checks else OutputStatus.PASSED
        return checked.model_copy(update={"status": status, "explanation": explanation, "remedy": remedy})


def _level_cost(output: OutputValidation, measured: Measured) -> float | None:
    """Return what the nearest rounding to the output's level costs; None where it has no such level, or rounds in a way of its own."""
    own = own_level(output.engine)
    known = output.level in LEVELS or output.level == "none"
    return measured.cost(own) if known and own != "float32" else None


def _choose_yardstick(
    output: OutputValidation, measured: Measured, *, from_reference: float | None, folder: Path
) -> tuple[Against | None, float | None, str]:
    """Choose what an output is compared with.

    Return it, the cost of the output's level beside it, and why there is no comparison; empty if there is one. ``from_reference`` is the cost
    beside the reference.
    """
    if has_separate_adapter(output.name):
        return "reference", 0.0, ""
    if output.to_stored is not None:
        return "stored", 0.0, ""
    if is_own_code(output.name, folder):
        # PyTorch computes with its stored weights, so they may be no further from the reference than rounding takes them.
        said = "PyTorch computes with the weights that it stores"
        return "reference", from_reference, "" if from_reference is not None else said
    why = measured.missing.get(output.name, "its weights are not read")
    beside: Against = "merged" if output.to_merged is not None else "reference"
    cost = measured.cost(own_level(output.engine)) if beside == "merged" else from_reference
    if cost is None:
        said = f"its results were not compared with its own weights: {why}, and what its level must cost is not known"
        return None, None, said
    return beside, cost, ""


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

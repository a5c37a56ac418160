"""Compute the results of one model that are compared, beside those in the files of its folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from slipway.proof.runtime import OWN_FOLDER, LanguageModel
from slipway.validation.texts import TextComparison
from slipway_validate.cases import find_family
from slipway_validate.protocol.inputs import INPUTS_FILE, SOUNDS_FILE, Answers, EncodedInputs
from slipway_validate.protocol.messages import BASE_LOGITS_FILE, LOGITS_FILE, LongResult, RunSpec
from slipway_validate.protocol.routes import BASE_ROUTES_FILE, ROUTES_FILE
from slipway_validate.runner.collect import Collector, Report
from slipway_validate.runner.generation.generating import answer_inputs
from slipway_validate.runner.own_text import measure_own_text
from slipway_validate.runner.routing import record_routes
from slipway_validate.runner.texts import compare_texts

NOT_WRITTEN = "the model is computed layer by layer, where each token that it writes takes a pass over all weights"
"""Why a model that does not fit into memory continues and answers nothing."""


class Computed(NamedTuple):
    """Results to compare, beside those in files."""

    continuations: tuple[tuple[int, ...], ...] = ()
    answers: Answers | None = None
    long: LongResult | None = None
    adapter: str = ""
    texts: TextComparison | None = None


def compute_results(model: LanguageModel, spec: RunSpec, collector: Collector, *, report: Report) -> Computed:
    """Compute the results to compare.

    Results of given tokens are computed together; then those of which each token follows from the one before.
    """
    model.prepare_comparison()
    jobs: list[Callable[[], None]] = [partial(_compute_windows, model, collector)]
    jobs += [partial(collector.case, case) for case in spec.cases]
    jobs.append(partial(collector.plain_rows, spec.cases))
    if spec.adapter:
        jobs.append(partial(_compute_base, model, collector))
        if spec.samples.with_name(OWN_FOLDER).is_dir():
            jobs.append(partial(measure_own_text, model, spec, collector.folder, report=report))
    model.together(jobs)
    continuations = collector.continuations(spec)
    answers = _answer_inputs(model, spec, report) if spec.write_logits else None
    long = _continue_long(spec, collector)
    if spec.drafting:
        from slipway_validate.runner.multi_token import measure_head

        measure_head(model, spec, collector.folder, report=report)
    texts = compare_texts(model, spec.texts) if spec.texts else None
    return Computed(continuations, answers, long, getattr(model, "adapter", "") if spec.adapter else "", texts)


def _compute_windows(model: LanguageModel, collector: Collector) -> None:
    with record_routes(model, collector.folder / ROUTES_FILE):
        collector.windows(LOGITS_FILE)


def _compute_base(model: LanguageModel, collector: Collector) -> None:
    """Compute the windows again without the adapter."""
    from slipway_validate.runner.runtime_reference import ReferenceModel

    assert isinstance(model, ReferenceModel)
    with model.without_adapter(), record_routes(model, collector.folder / BASE_ROUTES_FILE):
        collector.windows(BASE_LOGITS_FILE)


def _continue_long(spec: RunSpec, collector: Collector) -> LongResult | None:
    if spec.long is None:
        return None
    return LongResult(skipped=NOT_WRITTEN) if spec.by_layers else collector.long_continuations(spec.long)


def _answer_inputs(model: LanguageModel, spec: RunSpec, report: Report) -> Answers | None:
    """Answer the user's test inputs; None if there are none."""
    file = spec.samples / INPUTS_FILE
    if not file.is_file():
        return None
    if spec.by_layers:
        return Answers(skipped=NOT_WRITTEN)
    inputs = EncodedInputs.model_validate_json(file.read_bytes())
    features = spec.samples / SOUNDS_FILE
    sounds = np.load(features, mmap_mode="r") if features.is_file() else None
    return answer_inputs(model, find_family(spec.family), inputs, report=report, sounds=sounds)

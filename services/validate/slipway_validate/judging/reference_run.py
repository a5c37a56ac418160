"""The reference's results and figures, with which every output is compared."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipway.model.families import SPEECH, Family
from slipway.proof.numerics import finite, logit_scale, perplexity_of, window_losses
from slipway.proof.samples import Samples
from slipway.validation.comparisons import LogitComparison, ShapeCase
from slipway.validation.findings import AdapterEvidence
from slipway_validate.judging.compare import compare_windows, load_logits
from slipway_validate.judging.limits import MAX_NOISE_SHARE
from slipway_validate.judging.measures import Measure, choose_measure
from slipway_validate.protocol.messages import BASE_LOGITS_FILE, LOGITS_FILE, RunResult

UNSTEADY = "the reference itself gives other results in this shape, so it cannot judge an output"


@dataclass(frozen=True)
class ReferenceRun:
    """The result of running the reference.

    Attributes:
        folder: Folder of its runner.
        result: Result of its runner.
        family: The model's family.
        samples: The samples that every model computes.
        with_adapter: Whether it is base + adapter, not a plain model.
        merged_level: Row of the limits for the merge's data type.
        perplexity: Its perplexity.
        base_perplexity: Perplexity without the adapter.
        gain_per_window: Nats per token that the adapter saves, by window.
        adapter_effect: Comparison of the base with the reference.
        logit_scale: Root mean square of its results, at least 1.
        noise: Its arithmetic noise, in logits.
        unsteady_cases: Shape cases in which the reference differs from its plain pass, each with the reason to skip it for
            outputs that run the same code. A graph has its own code and is judged.
        evidence: What the adapter does on text like that of its training.
    """

    folder: Path
    result: RunResult
    family: Family
    samples: Samples
    with_adapter: bool
    merged_level: str
    perplexity: float | None = None
    base_perplexity: float | None = None
    gain_per_window: tuple[float | None, ...] = ()
    adapter_effect: LogitComparison | None = None
    logit_scale: float = 1.0
    noise: float | None = None
    unsteady_cases: dict[str, str] = field(default_factory=dict)
    evidence: tuple[AdapterEvidence, ...] = ()

    def with_figures(self, cases: list[ShapeCase]) -> ReferenceRun:
        """Return this run with the figures of its results; ``cases`` are its own, compared with its plain passes."""
        scale = logit_scale(self.logits)
        unsteady = {case.name: UNSTEADY for case in cases if _is_unsteady(case, scale)}
        if cases and cases[0].name in unsteady:  # the case in the native data type is padded like the first
            unsteady["native_dtype"] = UNSTEADY
        noises = [case.self_max_abs_diff or 0.0 for case in cases if case.name not in unsteady]
        run = replace(self, logit_scale=scale, noise=max(noises, default=None), unsteady_cases=unsteady)
        if self.with_adapter:
            effect = compare_windows(self.logits, self.base_logits, self.measure)
            run = replace(run, adapter_effect=effect)
        return run._with_losses()

    def _with_losses(self) -> ReferenceRun:
        labels = self.samples.labels
        if labels is None:
            return self
        losses = window_losses(self.logits, labels)
        run = replace(self, perplexity=perplexity_of(losses))
        if not self.with_adapter:
            return run
        base_losses = window_losses(self.base_logits, labels)
        # The random sound has no speech, so predicting a text from it better or worse does not judge the adapter.
        gains = () if self.family == SPEECH else tuple(finite(gain) for gain in base_losses - losses)
        return replace(run, base_perplexity=perplexity_of(base_losses), gain_per_window=gains)

    @property
    def measure(self) -> Measure:
        """Return how results are compared with those of the reference."""
        return choose_measure(self.family.comparison, width=self.result.vocabulary)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """Return the results, (N, P, V)."""
        return load_logits(self.folder / LOGITS_FILE)

    @property
    def base_logits(self) -> npt.NDArray[np.float32]:
        """Return the results without the adapter, (N, P, V)."""
        return load_logits(self.folder / BASE_LOGITS_FILE)


def _is_unsteady(case: ShapeCase, scale: float) -> bool:
    """Return whether a shape changes the model's results: left padding shifts the positions of some models."""
    return case.self_max_abs_diff is None or case.self_max_abs_diff > MAX_NOISE_SHARE * scale

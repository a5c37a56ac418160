"""The yardsticks of a validation's outputs: the reference's results, and passes that are planned here and read back.

Every output is compared with the reference. The passes measure how far it may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.model.families import Family
from slipway.proof.numerics import Logits, finite, logit_scale, perplexity_of, window_losses
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import Samples
from slipway.validation.comparisons import LogitComparison, ShapeCase
from slipway.validation.findings import AdapterEvidence
from slipway.validation.parts import MultiTokenHead
from slipway.validation.pictures import Sense
from slipway_validate.folders import format_and_level, has_separate_adapter, runtime_for
from slipway_validate.judging.compare import compare_windows, load_logits
from slipway_validate.judging.distances import MAX_NOISE_SHARE, Measure, choose_measure, distance_of, level_of
from slipway_validate.protocol.messages import (
    BASE_LOGITS_FILE,
    LOGITS_FILE,
    YARDSTICKS_FILE,
    Pass,
    RunResult,
    RunSpec,
    Yardsticks,
    pass_file,
)
from slipway_validate.protocol.pictures import Looked

UNSTEADY = "the reference itself gives other results in this shape, so it cannot judge an output"

MOST_WINDOWS = 4
"""Windows that are computed: a fault of a graph shows in a few hundred tokens."""
HALVES = ("float16", "bfloat16")
STATIC = "static"
"""Rounding of inputs in fixed ranges, which lie in the output and are not read."""
_OURS = "slipway.proof.transformers_runtime:load"
_COSTS = {
    "float16": ("float16", ""),
    "bfloat16": ("bfloat16", ""),
    "int8": ("int8/32", ""),
    "int4": ("int4/32", "int8/32"),
    "8da4w": ("int4/32", "int8/32"),
    "int3": ("int3/32", "int8/32"),
}
"""The nearest rounding of the merged weights, by stored type: of products, and of embedding and head where it differs."""


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
        multi_token_head: What it accepts of the drafts of its multi-token head; None if it has none.
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
    multi_token_head: MultiTokenHead | None = None

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
        gains = () if self.family.takes_sound else tuple(finite(gain) for gain in base_losses - losses)
        return replace(run, base_perplexity=perplexity_of(base_losses), gain_per_window=gains)

    def behind(self, sense: Sense) -> ReferenceRun | None:
        """Return its results behind pictures or sound as a run of its own; None if there are none."""
        looked = Looked.read(self.folder, sense)
        if looked is None or looked.not_run or not looked.pictures:
            return None
        run = replace(self, folder=self.folder / sense)
        effect = compare_windows(run.logits, run.base_logits, run.measure) if run.with_adapter else None
        return replace(run, logit_scale=logit_scale(run.logits), adapter_effect=effect)

    @property
    def knows_noise(self) -> bool:
        """Whether a single logit can be judged: a model that is unsteady in every shape that was tried has a noise that nobody knows."""
        return self.noise is not None or not self.unsteady_cases

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


def rounding_pass(rounding: str, *, halves_encoder: bool = False) -> str:
    """Return the name of the pass that rounds values as a runtime does, and its part for images and sound if it does that too."""
    return f"rounding:{rounding}{'+encoder' if halves_encoder else ''}"


def results_rounding(dtype: str) -> str:
    """Return the name of the rounding of a graph that computes in a type of 16 bits (``slipway.formats.contract.Runtime.rounds``)."""
    return f"results/{dtype}"


def cost_pass(level: str) -> str:
    """Return the name of the pass that rounds the merged weights to a stored type."""
    return f"weights:{level}"


def is_own_code(name: str, folder: Path) -> bool:
    """Return whether transformers runs the output itself, from the weights that it stores: then it is its own yardstick."""
    runtime = runtime_for(name, folder)
    return runtime is not None and runtime.load == _OURS


def rounding_of(name: str, folder: Path) -> str:
    """Return how the output's runtime rounds values; empty if it does not."""
    runtime = runtime_for(name, folder)
    return runtime.rounding(format_and_level(name)[1]) if runtime is not None else ""


def halves_encoder(name: str, folder: Path) -> bool:
    """Return whether the output's runtime computes parts for images and sound in float16 (``Runtime.halves_encoder``)."""
    runtime = runtime_for(name, folder)
    return runtime is not None and runtime.halves_encoder


def plan_yardsticks(
    inputs: Mapping[str, Path],
    outputs: Mapping[str, Path],
    reference: ReferenceRun,
    run: RunSpec,
    *,
    threads: int,
    logit_bytes: int,
) -> Yardsticks | None:
    """Plan the passes for a validation of these outputs; None if it needs none.

    Args:
        inputs: The inputs of the validation.
        outputs: Folders of the outputs by name.
        reference: The run of the reference.
        run: Samples, family and padding of every run.
        threads: Threads to compute with.
        logit_bytes: Most disk for logits, of which the passes take half.
    """
    passes = tuple(_passes(outputs, reference.merged_level))
    if not passes:
        return None
    each_window = max(1, reference.logits[:1].nbytes)
    windows = max(1, min(MOST_WINDOWS, len(reference.logits), logit_bytes // (2 * len(passes) * each_window)))
    return Yardsticks(
        base=inputs["base"].absolute(),
        adapter=inputs["adapter"].absolute() if "adapter" in inputs else None,
        run=run.model_copy(update={"cases": (), "prompts": (), "benchmark": None}),
        windows=windows,
        threads=threads,
        passes=passes,
    )


def _passes(outputs: Mapping[str, Path], merged_level: str) -> Iterator[Pass]:
    roundings: dict[tuple[str, bool], None] = {}
    costs: dict[str, None] = {}
    for name, folder in outputs.items():
        if runtime_for(name, folder) is None:
            continue
        level = level_of(stored_dtype(folder))
        own, beside = is_own_code(name, folder), has_separate_adapter(name)
        if not own and not beside:
            kept = merged_level if merged_level in HALVES else "float16" if halves_encoder(name, folder) else ""
            yield Pass(name=name, output=folder.absolute(), weights=kept)
        if not beside:
            # An output made of a merged model was rounded to that model's type first.
            costs |= dict.fromkeys(each for each in (level, merged_level) if each in _COSTS)
        rounding = rounding_of(name, folder)
        if rounding not in ("", STATIC):
            roundings[rounding, halves_encoder(name, folder)] = None
        if not own and level in HALVES:
            roundings[results_rounding(level), False] = None  # its runtime may compute in that type
    for rounding, halved in roundings:
        yield Pass(name=rounding_pass(rounding, halves_encoder=halved), rounding=rounding, halves_encoder=halved)
    for each in costs:
        weights, outer = _COSTS[each]
        yield Pass(name=cost_pass(each), weights=weights, outer=outer)


@dataclass(frozen=True)
class Measured:
    """The results of the passes.

    Attributes:
        folder: Where the kept results lie.
        windows: Windows that were computed.
        figures: Distance from the reference of each pass without an output.
        missing: Why passes were not made, by name.
        behind: The same of results behind pictures and sound, if there are any.
    """

    folder: Path = Path()
    windows: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    behind: Mapping[Sense, Measured] = field(default_factory=dict)

    def noise(self, rounding: str, *, halves_encoder: bool = False) -> float | None:
        """Return the distance that rounded values alone make; None if it was not measured."""
        return self.figures.get(rounding_pass(rounding, halves_encoder=halves_encoder)) if rounding else 0.0

    def cost(self, level: str) -> float | None:
        """Return the distance that the nearest rounding of the merged weights to a stored type makes; None if it is not known."""
        return 0.0 if level == "float32" else self.figures.get(cost_pass(level))

    def results(self, output: str) -> Logits | None:
        """Return the results of PyTorch on the weights that an output stores, (N, P, V); None if there are none."""
        path = self.folder / pass_file(output)
        return load_logits(path) if path.is_file() else None

    def cost_together(self, levels: set[str]) -> float | None:
        """Return the cost of several roundings of the weights; None if one of them is not known."""
        costs = [self.cost(each) for each in levels]
        return None if None in costs else sum(each for each in costs if each is not None)

    def compare_stored(self, output: str, own: Logits, measure: Measure) -> LogitComparison | None:
        """Compare an output's first windows with PyTorch on the weights that it stores; None if those were not read.

        Args:
            output: Name of the output.
            own: Its results, (N, P, V).
            measure: How results are compared.
        """
        theirs = self.results(output)
        if theirs is None or theirs.shape[1:] != own.shape[1:]:
            return None
        return compare_windows(theirs, own[: len(theirs)], measure)


def read_measured(folder: Path, asked: Yardsticks | None, reference: ReferenceRun | None) -> Measured:
    """Read what a process wrote, and compare the passes without an output with the reference; without results if it ended early."""
    if asked is None or reference is None:
        return Measured()
    try:
        said = read_json_object(folder / YARDSTICKS_FILE, largest=LARGEST_LIST)
    except (OSError, ValueError):
        return Measured(missing={each.name: "the process that computed it ended early" for each in asked.passes})
    missing = {name: str(why) for name, why in said.items()}
    behind = {
        sense: _read_passes(folder / sense, asked, run, missing) for sense in Sense if (run := reference.behind(sense))
    }
    return replace(_read_passes(folder, asked, reference, missing, windows=asked.windows), behind=behind)


def _read_passes(
    folder: Path, asked: Yardsticks, reference: ReferenceRun, missing: Mapping[str, str], *, windows: int = 0
) -> Measured:
    figures = {}
    for each in asked.passes:
        path = folder / pass_file(each.name)
        if each.output is not None or not path.is_file():
            continue
        logits = load_logits(path)
        distance = distance_of(compare_windows(reference.logits[: len(logits)], logits, reference.measure))
        path.unlink()
        if distance is not None:
            figures[each.name] = distance
    return Measured(folder, windows, figures, missing)

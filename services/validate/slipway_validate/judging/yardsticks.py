"""Plan the passes with which the outputs of a validation are measured, and read their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.proof.numerics import Logits
from slipway.proof.precision import stored_dtype
from slipway_validate.folders import format_and_level, has_separate_adapter, runtime_for
from slipway_validate.judging.compare import compare_windows, load_logits
from slipway_validate.judging.limits import level_of
from slipway_validate.judging.measures import distance_of
from slipway_validate.judging.reference_run import ReferenceRun
from slipway_validate.protocol.messages import YARDSTICKS_FILE, Pass, RunSpec, Yardsticks, pass_file

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


def rounding_pass(rounding: str) -> str:
    """Return the name of the pass that rounds values as a runtime does."""
    return f"rounding:{rounding}"


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
    roundings: dict[str, None] = {}
    costs: dict[str, None] = {}
    for name, folder in outputs.items():
        if runtime_for(name, folder) is None:
            continue
        level = level_of(stored_dtype(folder))
        own, beside = is_own_code(name, folder), has_separate_adapter(name)
        if not own and not beside:
            yield Pass(name=name, output=folder.absolute())
        if not beside:
            # An output made of a merged model was rounded to that model's type first.
            costs |= dict.fromkeys(each for each in (level, merged_level) if each in _COSTS)
        rounding = rounding_of(name, folder)
        if rounding not in ("", STATIC):
            roundings[rounding] = None
        if not own and level in HALVES:
            roundings[results_rounding(level)] = None  # its runtime may compute in that type
    yield from (Pass(name=rounding_pass(each), rounding=each) for each in roundings)
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
    """

    folder: Path = Path()
    windows: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def noise(self, rounding: str) -> float | None:
        """Return the distance that rounded values alone make; None if it was not measured."""
        return self.figures.get(rounding_pass(rounding)) if rounding else 0.0

    def cost(self, level: str) -> float | None:
        """Return the distance that the nearest rounding of the merged weights to a stored type makes; None if it is not known."""
        return 0.0 if level == "float32" else self.figures.get(cost_pass(level))

    def results(self, output: str) -> Logits | None:
        """Return the results of PyTorch on the weights that an output stores, (N, P, V); None if there are none."""
        path = self.folder / pass_file(output)
        return load_logits(path) if path.is_file() else None


def read_measured(folder: Path, asked: Yardsticks | None, reference: ReferenceRun | None) -> Measured:
    """Read what a process wrote, and compare the passes without an output with the reference; without results if it ended early."""
    if asked is None or reference is None:
        return Measured()
    try:
        said = read_json_object(folder / YARDSTICKS_FILE, largest=LARGEST_LIST)
    except (OSError, ValueError):
        return Measured(missing={each.name: "the process that computed it ended early" for each in asked.passes})
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
    return Measured(folder, asked.windows, figures, {name: str(why) for name, why in said.items()})

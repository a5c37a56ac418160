"""Calibrate a model from start to end: read text, round block by block, tune, choose by held-out text, write.

The written artifact has the codes and a description of how they were found.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipway.distribution import installed_version
from slipway.errors import QuantizationError
from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway_quantize.calibrated import DESCRIPTION, SCHEMA, WEIGHTS
from slipway_quantize.calibration.effort import STEP_WINDOWS, Effort, plan_effort
from slipway_quantize.calibration.finished import Finished
from slipway_quantize.calibration.params import CalibrateParams
from slipway_quantize.calibration.rounding.grid import Fixed, Grid
from slipway_quantize.calibration.rounding.methods import BY_INPUTS, NEAREST, Rounded, best_method, read_rounded
from slipway_quantize.calibration.rounding.rounds import Rounds
from slipway_quantize.calibration.streaming.crew import Crew
from slipway_quantize.calibration.streaming.experts import report_unreached, require_mixture_known
from slipway_quantize.calibration.streaming.layers import Rounding
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.streaming.walk import BlockWalk
from slipway_quantize.calibration.tuning.divergence import compares_distributions, divergence
from slipway_quantize.calibration.tuning.tuning import Schedule, Tuning, embedding_moments
from slipway_quantize.calibration.widths import rounding_costs, wide_layers
from slipway_quantize.calibration.windows import LEAST_WINDOWS, Batch, Windows, read_windows
from slipway_quantize.levels import WIDE

_LIBRARIES = ("numpy", "safetensors", "torch", "transformers")

_RATE, _SCALE_RATE = 0.004, 1.2e-3
_STATE = "tuning"
_EMBEDDED = "embedding"
_COSTS = "costs"
_MIXED = "best of each layer"
_STATES = 8
"""States of the tuning that are kept, one in place of the other."""


def write_calibration(
    target: Path, model: StreamedModel, result: Result, *, params: CalibrateParams, facts: dict[str, Any]
) -> None:
    """Write ``weights.safetensors`` and ``calibration.json`` into ``target``: the same bytes in every run.

    Args:
        target: An empty folder.
        model: The model.
        result: What to write.
        params: Parameters.
        facts: More to describe; nothing that differs from run to run, such as times.
    """
    tensors = {}
    for name, weight in result.weights.items():
        tensors[f"{name}.codes"] = weight.codes.contiguous()
        tensors[f"{name}.scales"] = weight.fitted.scales.float().contiguous()
        if weight.fitted.zeros is not None:
            tensors[f"{name}.zero_points"] = weight.fitted.zeros.to(torch.int8).contiguous()
    save_file(tensors, target / WEIGHTS)
    (target / WEIGHTS).chmod(0o644)
    description = {
        "schema_version": SCHEMA,
        "bits": params.bits,
        "group_size": params.group_size,
        "symmetric": params.symmetric,
        "seed": params.seed,
        "scale_dtype": str(model.dtype).removeprefix("torch."),
        "tied_embedding": model.tied,
        **facts,
        "weights": {
            name: {
                "method": method,
                "bits": result.weights[name].grid.bits,
                "held_out_error_before": result.errors[name]["rtn"],
                "held_out_error": result.errors[name].get(method),
                **({"divergence": max(0.0, result.alone[name])} if name in result.alone else {}),
            }
            for name, method in result.methods.items()
        },
        "libraries": {name: installed_version(name) for name in _LIBRARIES},
    }
    text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    (target / DESCRIPTION).write_text(text, encoding="utf-8")


@dataclass
class Result:
    """The result of a calibration.

    Attributes:
        weights: The rounded weights, by layer.
        methods: The method of each layer.
        errors: Relative error of each layer's results on held-out inputs, by method.
        divergences: Divergence of the whole model on held-out text, by method.
        alone: Divergence that each layer adds on held-out text if it alone is rounded, if that was asked for and is affordable.
    """

    weights: dict[str, Fixed] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    divergences: dict[str, float] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)


class Calibration:
    """One calibration.

    Args:
        source: The model's folder.
        data: The text's folder.
        params: Parameters.
        ctx: Progress, cancellation, memory, and the kept folder of an interrupted attempt.
    """

    def __init__(self, source: Path, data: Path, *, params: CalibrateParams, ctx: Context) -> None:
        self._params = params
        self._ctx = ctx
        folder = ModelFolder.open(source)
        load = partial(StreamedModel, folder, group_size=params.group_size, head=params.head, sensitive=False)
        self.model = load()
        if self.model.experts:
            require_mixture_known(params.method, symmetric=params.symmetric)
        if not self.model.layers:
            raise QuantizationError(
                f"no linear layer has an input width that is a multiple of the group size {params.group_size}",
                reason="QUANTIZATION_UNSUPPORTED",
                remedy="choose a smaller group size, or level bf16",
                about={"group_size": params.group_size},
            )
        self.grid = Grid(params.bits, params.group_size, params.symmetric, self.model.dtype)
        self.wide: dict[str, Grid] = {}
        self.effort: Effort = plan_effort(self.model, params)
        self.models = [self.model, *(load(finite=True) for _ in range(1, self.effort.members))]
        self.windows: Windows = read_windows(
            data,
            folder,
            count=params.windows,
            length=params.window_tokens,
            vocabulary=self.model.vocabulary,
            seed=params.seed,
            start=self.model.start,
        )
        self.distributions = compares_distributions(self.model.family, self.model.model.config)
        pieces = ctx.kept if ctx.kept is not None else ctx.workdir / "pieces"
        pieces.mkdir(parents=True, exist_ok=True)
        self._finished = Finished(pieces, self._identity())

    def _identity(self) -> str:
        """Return a digest of what pieces depend on; the kept folder belongs to this model, its parameters and versions anyway."""
        known = [self.windows.digest, self._params.model_dump(mode="json"), list(self.model.layers), torch.__version__]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def _batches(self, windows: tuple[Tensor, ...], size: int) -> list[Batch]:
        return [self.windows.batch(list(windows[start : start + size])) for start in range(0, len(windows), size)]

    def _progress(self, phase: str, done: int, total: int, unit: str) -> None:
        self._ctx.progress(phase, done=done, total=total, unit=unit)

    def run(self) -> Result:
        """Round, tune and choose."""
        with Crew(self.effort.members, threads=self._params.threads) as self._crew:
            return self._run()

    def _run(self) -> Result:
        method = self._params.method
        tried = BY_INPUTS if method in ("auto", "autoround") else tuple(dict.fromkeys(("rtn", method)))
        choices = tried if method in ("auto", "autoround") else (method,)
        held_out = self.windows.held_out[: max(LEAST_WINDOWS, self.effort.windows // 8)]
        judging = self._batches(held_out, self.effort.in_blocks)
        fit = self.windows.fit[: max(LEAST_WINDOWS, self.effort.windows - len(held_out))]
        fitting = self._batches(fit, self.effort.in_blocks)
        walks = [BlockWalk(model, [*judging, *fitting], self._finished.folder) for model in self.models]
        reads = any(each != NEAREST for each in tried)
        exact = [walk.with_batches(fitting, "exact") for walk in walks] if reads else []
        count = len(walks[0].names)
        self._widen(fit)
        rounds = Rounds(
            walks,
            exact=exact,
            crew=self._crew,
            judging=len(judging),
            methods=tried,
            choices=choices,
            grid=self.grid,
            wide=self.wide,
            embedded=self._measure_embedding(fit, count),
            finished=self._finished,
            on_block=lambda done: self._progress("blocks", done, count, "blocks"),
        )
        rounds.run()
        if rounds.resumed:
            self._ctx.log.info(f"blocks of an interrupted attempt are used: {rounds.resumed} of {count}")
        self._ctx.record(blocks=count, blocks_resumed=rounds.resumed)
        result = self._choose(count, tried, choices, self._batches(held_out, self.effort.at_once))
        if windows := self.effort.alone:
            chosen = self._batches(held_out[:windows], self.effort.at_once)
            result.alone = self._judge(chosen, {name: {name: weight} for name, weight in result.weights.items()})
        elif self._params.sensitivity:
            self._ctx.warn(
                "the divergence that each weight adds was not measured, which would take longer than the time budget: "
                "bits are chosen by the weights alone"
            )
        return result

    def _widen(self, fit: tuple[Tensor, ...]) -> None:
        """Give some layers grids of more bits."""
        if not self.effort.costed:
            return
        names = list(self.model.layers)
        batches = self._batches(fit[: self.effort.costed], self.effort.at_once)
        if not self._finished.has(_COSTS):
            costs = rounding_costs(
                self.models,
                batches,
                grid=self.grid,
                distributions=self.distributions,
                crew=self._crew,
                seed=self._params.seed,
                save_memory=self.effort.save_memory,
                on_batch=lambda done: self._progress("costs", done, len(batches), "batches"),
            )
            known = torch.tensor([costs.get(name, 0.0) for name in names], dtype=torch.float64)
            self._finished.put(_COSTS, {_COSTS: known})
        costs = dict(zip(names, self._finished.get(_COSTS)[_COSTS].tolist(), strict=True))
        # All experts of a layer have the same bits, because vLLM has one scheme for them.
        weights = {
            name: layer.stored.numel() for name, layer in self.model.layers.items() if name not in self.model.experts
        }
        costs = {name: cost for name, cost in costs.items() if name in weights}
        wide = wide_layers(costs, weights, bits=self._params.bits, share=self._params.wide_share)
        # At so many bits, a zero point gains nothing.
        self.wide = dict.fromkeys(wide, replace(self.grid, bits=WIDE, symmetric=True))
        self._ctx.record(wide_layers=len(wide), expected_divergence=sum(costs[name] for name in costs.keys() - wide))

    def _measure_embedding(self, fit: tuple[Tensor, ...], blocks: int) -> dict[str, Tensor]:
        """Return the matrix to add to the moments of a head's inputs for each position, if the head is tied to the embedding."""
        if not self.effort.embedded:
            return {}
        if not self._finished.has(_EMBEDDED):
            moments = embedding_moments(
                self.models,
                self._batches(fit[: self.effort.embedded], self.effort.at_once),
                crew=self._crew,
                seed=self._params.seed,
                on_batch=lambda: self._progress("blocks", 0, blocks, "blocks"),
            )
            self._finished.put(_EMBEDDED, {"moments": moments})
        return dict.fromkeys(self.model.tied_layers, self._finished.get(_EMBEDDED)["moments"])

    def _choose(self, blocks: int, tried: tuple[str, ...], choices: tuple[str, ...], judging: list[Batch]) -> Result:
        rounded: dict[str, dict[str, Rounded]] = {}
        result = Result()
        for index in range(blocks):
            tensors = self._finished.get(f"block-{index}")
            for name, errors in self._finished.facts(f"block-{index}")["errors"].items():
                result.errors[name] = errors
                rounded[name] = {
                    each: read_rounded(tensors, name, each, self.wide.get(name, self.grid)) for each in tried
                }
        chosen = {name: best_method(errors, choices) for name, errors in result.errors.items()}
        best = {name: rounded[name][chosen[name]] for name in rounded}
        result.weights, result.methods = {name: one.weight for name, one in best.items()}, chosen
        whole = {each: {name: by_method[each].weight for name, by_method in rounded.items()} for each in tried}
        same = {chosen[name] for name in chosen if name not in self.wide}
        if len(choices) > 1 and len(same) > 1:
            whole[_MIXED] = result.weights
        result.divergences = self._judge(judging, whole)
        if len(choices) > 1:
            result.divergences.setdefault(_MIXED, result.divergences[min(same)])
            single = min(tried, key=result.divergences.__getitem__)
            if result.divergences[single] < result.divergences[_MIXED]:
                best = {name: rounded[name][single] for name in rounded}
                result.weights, result.methods = whole[single], dict.fromkeys(rounded, single)
        if self.effort.steps:
            self._tune(best, judging, result)
        return result

    def _judge(self, judging: list[Batch], tried: Mapping[str, Mapping[str, Rounding]]) -> dict[str, float]:
        """Return the mean divergence of each rounded model on held-out text, by its name."""

        @torch.no_grad()
        def judge_batch(member: int, numbered: tuple[int, Batch]) -> tuple[int, dict[str, float]]:
            model, divergences = self.models[member], dict[str, float]()
            number, batch = numbered
            self._progress("judge", number, len(judging), "batches")
            exact = model.outputs(batch)
            for name, weights in tried.items():
                with model.use_rounded(weights):
                    other = model.outputs(batch)
                divergences[name] = float(divergence(exact, other, distributions=self.distributions))
            return len(exact), divergences

        each = self._crew.map(judge_batch, list(enumerate(judging)))
        positions = max(1, sum(count for count, _ in each))
        return {name: sum(divergences[name] for _, divergences in each) / positions for name in tried}

    def _tune(self, start: Mapping[str, Rounded], judging: list[Batch], result: Result) -> None:
        """Tune all layers; take the outcome if it is better on held-out text, or was asked for."""
        effort, params = self.effort, self._params
        if effort.save_memory:
            for model in self.models:
                model.save_memory()
        folder = self._ctx.workdir / "arrays"
        folder.mkdir(exist_ok=True)
        schedule = Schedule(effort.steps, STEP_WINDOWS, effort.at_once, _RATE, _SCALE_RATE, params.seed)
        tuning = Tuning(
            self.models,
            start,
            self.windows,
            crew=self._crew,
            schedule=schedule,
            folder=folder,
            distributions=self.distributions and not self.model.tunes_hidden_states,
        )
        first = 0
        if self._finished.has(_STATE):
            tuning.restore(self._finished.get(_STATE))
            first = int(self._finished.facts(_STATE)["steps"])
        self._ctx.record(steps=effort.steps, steps_resumed=first)
        every = max(1, effort.steps // _STATES)

        def on_step(done: int) -> None:
            self._progress("tune", done, effort.steps, "steps")
            if self._ctx.kept is not None and done % every == 0 and done < effort.steps:
                self._finished.put(_STATE, tuning.state(), steps=done)

        tuning.run(first=first, on_step=on_step, on_window=self._ctx.check_cancelled)
        tuned = tuning.to_fixed()
        result.divergences |= self._judge(judging, {"autoround": tuned})
        if params.method == "autoround" or result.divergences["autoround"] <= min(result.divergences.values()):
            result.weights, result.methods = tuned, dict.fromkeys(tuned, "autoround")


def calibrate(source: Path, data: Path, target: Path, *, params: CalibrateParams, ctx: Context) -> None:
    """Calibrate the model in ``source`` and write the result into the empty folder ``target``.

    Raises:
        QuantizationError: With the reasons listed in the package's README.
    """
    begin = time.monotonic()
    threads = torch.get_num_threads()
    torch.set_num_threads(params.threads)
    try:
        calibration = Calibration(source, data, params=params, ctx=ctx)
        result = calibration.run()
    finally:
        torch.set_num_threads(threads)
    facts: dict[str, Any] = {
        "model": ctx.input_digests.get("model", ""),
        "data_sha256": calibration.windows.digest,
        "divergence": {method: float(value) for method, value in result.divergences.items()},
        "windows": {"fit": len(calibration.windows.fit), "held_out": len(calibration.windows.held_out)},
        "steps": calibration.effort.steps,
        **report_unreached(calibration.model.experts, result.methods, "these are rounded to the nearest", ctx),
    }
    write_calibration(target, calibration.model, result, params=params, facts=facts)
    # Facts of the attempt alone: the artifact has the same digest in every run.
    seconds = round(time.monotonic() - begin, 1)
    ctx.record(**facts, seconds=seconds)

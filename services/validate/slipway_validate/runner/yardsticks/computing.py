"""Compute the passes of a yardstick spec: load the reference's model once, and let it compute with one set of weights after another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers.activations import GELUActivation

from slipway.errors import ModelExportError
from slipway.files.json_documents import read_object_or_empty
from slipway.formats.registry import runtime_of_output
from slipway.model.adapters.saved import is_plain_lora
from slipway.proof.runtime import NotRunnable, Samples, Unusable
from slipway.proof.sights import read_sights
from slipway.proof.stored_weights import NotUnderstoodError
from slipway.validation.pictures import Sense
from slipway_validate.cases import find_family
from slipway_validate.protocol.messages import YARDSTICKS_FILE, Pass, Yardsticks, pass_file
from slipway_validate.runner.collect import Collector
from slipway_validate.runner.pictures.looking import look
from slipway_validate.runner.runtime_reference import ReferenceModel, load
from slipway_validate.runner.survival.measuring import open_stored
from slipway_validate.runner.yardsticks.encoders import round_encoder
from slipway_validate.runner.yardsticks.roundings import (
    RESULTS,
    RoundedResults,
    encoder_inputs,
    encoder_weights,
    input_rounding,
    weight_rounding,
)
from slipway_validate.runner.yardsticks.weights import Products

_FAULTS = (
    NotUnderstoodError,
    NotRunnable,
    Unusable,
    ModelExportError,
    OSError,
    ValueError,
    LookupError,
    RuntimeError,
    ArithmeticError,
)
"""What reading weights of an unknown form may raise: then that pass is not made, and the others are."""
_DESCRIPTIONS = ("onnx_export.json", "gguf.json")
"""Files that say whether an output approximates GELU by tanh."""
Report = Callable[[str, int, int], None]


def compute_yardsticks(spec: Yardsticks, folder: Path, *, report: Report) -> None:
    """Compute every pass and write its results, and last a file that says which passes were not made, and why.

    Args:
        spec: The passes.
        folder: Where the results go.
        report: Called with the phase, the passes that are done, and all.
    """
    missing: dict[str, str] = {}
    try:
        if spec.adapter is not None and not is_plain_lora(spec.adapter):
            raise NotUnderstoodError("the adapter changes more than products by factors")
        model = load(spec.base, spec.adapter, threads=spec.threads, by_layers=spec.by_layers)
        model.prepare_comparison()
        bench = _Bench(spec, folder, model)
    except _FAULTS as error:
        missing = {each.name: str(error) or type(error).__name__ for each in spec.passes}
    else:
        for number, each in enumerate(spec.passes):
            report("yardsticks", number, len(spec.passes))
            try:
                bench.compute(each)
            except _FAULTS as error:
                missing[each.name] = str(error) or type(error).__name__
    (folder / YARDSTICKS_FILE).write_text(json.dumps(missing), encoding="utf-8")


class _Bench:
    """The model, and its samples."""

    def __init__(self, spec: Yardsticks, folder: Path, model: Any) -> None:
        self._spec, self._folder, self._model = spec, folder, model
        module = model.module
        self._plain = module.get_base_model() if hasattr(module, "get_base_model") else module
        self._products = Products(self._plain, find_family(spec.run.family).unused)
        self._samples = _take_first(Samples.read(spec.run.samples), spec.windows)
        self._sights = {each: sights for each in Sense if (sights := read_sights(spec.run.samples, each))}
        for each in self._sights:
            (folder / each).mkdir(exist_ok=True)

    def compute(self, asked: Pass) -> None:
        """Compute one pass and write its results."""
        with ExitStack() as changed:
            if asked.weights or asked.output is not None:
                alone = self._model.without_adapter() if isinstance(self._model, ReferenceModel) else nullcontext()
                changed.enter_context(alone)
            if asked.output is not None:
                runtime = runtime_of_output(asked.name)
                stored = open_stored(asked.output, self._spec.base, self._products.rows_of, runtime)
                changed.enter_context(
                    self._products.use_stored(stored, encoder=weight_rounding(asked.weights or "float32"))
                )
                if any(read_object_or_empty(asked.output / each).get("gelu_approximation") for each in _DESCRIPTIONS):
                    changed.enter_context(approximate_gelu(self._plain))
            elif asked.weights:
                rounding = weight_rounding(asked.weights)
                others = weight_rounding(asked.outer or asked.weights)
                encoder = encoder_weights(asked.weights)
                changed.enter_context(self._products.use_rounded(self._plain, rounding, others, encoder=encoder))
            if asked.rounding.startswith(RESULTS):
                if self._spec.by_layers:
                    raise NotUnderstoodError("results are not rounded where a model is computed layer by layer")
                changed.enter_context(RoundedResults(asked.rounding))
            elif asked.rounding:
                rounding = input_rounding(asked.rounding)
                encoder = encoder_inputs(asked.rounding if asked.halves_encoder else "float32")
                changed.enter_context(self._products.round_inputs(rounding, encoder=encoder))
            collector = Collector(self._model, self._spec.run, self._samples, self._folder, report=lambda *_: None)
            self._model.together([partial(collector.windows, pass_file(asked.name))])
            for each in self._sights:
                with suppress(*_FAULTS):  # then results behind pictures have no such yardstick, and those on text have
                    self._look(asked, each)

    def _look(self, asked: Pass, sense: Sense) -> None:
        """Compute the prompts with a picture or sound, and write their results."""
        if asked.output is not None or asked.weights:
            self._products.check_encoder()
        with round_encoder(self._plain) if asked.halves_encoder else nullcontext():
            results = look(self._model, self._sights[sense], report=lambda *_: None)
        np.save(self._folder / sense / pass_file(asked.name), results)


def _take_first(samples: Samples, count: int) -> Samples:
    def cut(values: Any) -> Any:
        return None if values is None else np.asarray(values[:count])

    return Samples(cut(samples.tokens), cut(samples.source), cut(samples.positions), cut(samples.labels))


@contextmanager
def approximate_gelu(model: nn.Module) -> Iterator[None]:
    """Let the GELUs of a model compute what ``FastGelu`` does, within the block."""
    ours = [each for each in model.modules() if isinstance(each, GELUActivation)]
    plain = [each for each in model.modules() if isinstance(each, nn.GELU) and each.approximate == "none"]
    before = [each.act for each in ours]
    try:
        for activation in ours:
            activation.act = partial(nn.functional.gelu, approximate="tanh")
        for layer in plain:
            layer.approximate = "tanh"
        yield
    finally:
        for activation, act in zip(ours, before, strict=True):
            activation.act = act
        for layer in plain:
            layer.approximate = "none"

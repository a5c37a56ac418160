"""Validate outputs in this process: the whole stage without its runner processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.documents.heldout import HeldOutText
from slipway.documents.reader import Document
from slipway.model.folder import ModelFolder
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import Samples
from slipway.stage import Context
from slipway.validation.findings import OutputValidation
from slipway_validate.folders import find_refusal, runtime_for
from slipway_validate.judging.compare import CaseResults, compare_case
from slipway_validate.judging.distances import LIMITS, level_of
from slipway_validate.judging.evaluate import Evaluator
from slipway_validate.judging.yardsticks import Measured, ReferenceRun, plan_yardsticks, read_measured
from slipway_validate.outputs import explain_shape_reuse
from slipway_validate.params import ValidateParams
from slipway_validate.preparation import (
    Prepared,
    _affordable,
    _embeds,
    count_pictures,
    expected_senses,
    open_models,
    padding_token,
)
from slipway_validate.protocol.messages import RunResult, RunSpec, Spec, TokenizeSpec
from slipway_validate.reference.running import RUNTIME
from slipway_validate.runner.main import execute
from slipway_validate.runner.yardsticks.computing import compute_yardsticks
from support.models.stored_survival import survival_of
from support.models.validation_models import TEXT

PARAMS: dict[str, Any] = {"sequence_length": 48, "test_samples": 6, "max_new_tokens": 4, "benchmark_performance": False}


class Validated:
    """One reference and the outputs compared with it.

    Attributes:
        reference: The reference's run.
        evaluator: Judges outputs.
        settings: Folder with the configuration of the reference.
    """

    def __init__(
        self, base: Path, adapter: Path | None, work: Path, *, merged: Path, params: Mapping[str, Any] = {}
    ) -> None:
        self.work, self._base, self._adapter = work, base, adapter
        self.params = ValidateParams(**{**PARAMS, **params})
        _, trained = open_models({"base": base} | ({"adapter": adapter} if adapter else {}), work)
        self.settings = settings = trained.path
        self.config = trained.config
        family = trained.family
        assert family is not None
        said = HeldOutText((Document("text.txt", text=TEXT),), "test", ("text.txt",), held_out=True)
        text = said.write(work / "documents.jsonl")
        windows, length = _affordable(trained.config, family, self.params)
        told = TokenizeSpec(
            tokenizer=settings, model=settings, family=family.name, text=text, windows=windows, length=length, seed=0,
            samples=work / "samples",
        )  # fmt: skip
        made = self._run(Spec(tokenize=told), work / "tokenize")
        samples = Samples.read(told.samples)
        self.prepared = Prepared(
            family, said, made.source, told.samples, samples, padding_token(trained.config, family), settings,
            embeds=_embeds({"base": base}, family, Context(workdir=work)),
        )  # fmt: skip
        pictures = count_pictures(trained.config, family, self.params)
        self.expected_senses = expected_senses(trained.config, family)
        spec = self.spec(RUNTIME, base).model_copy(update={"adapter": adapter, "pictures": pictures})
        result = self._run(Spec(run=spec), work / "reference")
        self.reference = ReferenceRun(
            folder=work / "reference", result=result, family=family, samples=samples, with_adapter=adapter is not None,
            merged_level=level_of(stored_dtype(merged)),
        )  # fmt: skip
        where = CaseResults(work / "reference", work / "reference", self.reference.measure)
        cases = [compare_case(case, where) for case in spec.cases]
        self.reference = self.reference.with_figures(cases)
        self.evaluator = Evaluator(
            self.reference, family, LIMITS, decode=lambda _: "", expected_senses=self.expected_senses
        )

    def spec(self, runtime: str, folder: Path) -> RunSpec:
        return self.prepared.spec(runtime, folder, params=self.params, threads=1)

    def read_weights(self, outputs: Mapping[str, Path]) -> Measured:
        """Read what outputs store, and compute with it, as the stage does in a process beside them; they are judged by that from here on."""
        inputs = {"base": self._base} | ({"adapter": self._adapter} if self._adapter else {})
        asked = plan_yardsticks(
            inputs, outputs, self.reference, self.spec(RUNTIME, self._base), threads=1, logit_bytes=1 << 30
        )
        assert asked is not None
        (folder := self.work / "weights").mkdir()
        compute_yardsticks(asked, folder, report=lambda *_: None)
        measured = read_measured(folder, asked, self.reference)
        held = survival_of(self._base, self._adapter, outputs) if self._adapter else {}
        self.evaluator = Evaluator(
            self.reference,
            self.prepared.family,
            LIMITS,
            decode=lambda _: "",
            survival=lambda: held,
            measured=lambda: measured,
            base=ModelFolder.open(self._base),
            expected_senses=self.expected_senses,
        )
        return measured

    def output(self, name: str, folder: Path) -> OutputValidation:
        runtime = runtime_for(name, folder)
        assert runtime is not None
        known = explain_shape_reuse(runtime, folder, self.settings)
        beside = self._base if runtime.on_base else None
        spec = self.spec(runtime.load, folder).model_copy(update={"cases_known": known, "base": beside})
        run = self.work / "outputs" / name
        result = find_refusal(name, folder, runtime, self.prepared.family) or self._run(Spec(run=spec), run, must=False)
        return self.evaluator.evaluate(name, folder, spec=spec, result=result, run_folder=run)

    def _run(self, spec: Spec, folder: Path, *, must: bool = True) -> RunResult:
        folder.mkdir(parents=True)
        result, _ = execute(spec, folder)
        assert result.status == "done" or not must, result.message
        return result

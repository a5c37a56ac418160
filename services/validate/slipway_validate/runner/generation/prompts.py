"""Answer one prompt greedily, and time it: a model under its name, and a reference without its adapter under the base's."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from slipway.model.families import Family
from slipway.proof.numerics import Logits
from slipway.proof.runtime import LanguageModel, NotRunnable, Unusable
from slipway.validation.questions import BASE
from slipway_validate.cases import find_family
from slipway_validate.protocol.inputs import ANSWERED_FILE, INPUTS_FILE, Answered, EncodedInputs, PromptAnswer
from slipway_validate.protocol.messages import RunSpec
from slipway_validate.runner.generation.generating import Report, find_excess, write_text


def answer_prompt(model: LanguageModel, spec: RunSpec, folder: Path, *, report: Report) -> None:
    """Write the answers into the folder of the run. They are computed as validation compares: in float32 where the runtime allows a choice.

    Raises:
        NotRunnable: The engine takes fewer tokens.
        Unusable: The model computes NaN.
    """
    inputs = EncodedInputs.model_validate_json((spec.samples / INPUTS_FILE).read_bytes())
    family, most = find_family(spec.family), inputs.inputs[0].most
    if excess := find_excess(model, family, inputs):
        raise NotRunnable(excess)
    model.prepare_comparison()
    answers = {}
    for number, name in enumerate(spec.asks):
        pace = _Pace(report, before=number * most, total=len(spec.asks) * most)
        with _without_adapter(model) if name == BASE and spec.adapter is not None else nullcontext():
            answers[name] = _answer(model, family, inputs, pace)
    (folder / ANSWERED_FILE).write_text(Answered(answers=answers).model_dump_json(), encoding="utf-8")


def _without_adapter(model: LanguageModel) -> AbstractContextManager[None]:
    from slipway_validate.runner.runtime_reference import ReferenceModel

    assert isinstance(model, ReferenceModel)
    return model.without_adapter()


class _Pace:
    """Notes when each token is chosen, and refuses logits that choose none.

    Args:
        report: Called with a phase, the number of tokens so far, and how many there will be at most.
        before: Tokens of models before this one.
        total: Most tokens of all models.
    """

    def __init__(self, report: Report, *, before: int, total: int) -> None:
        self._report, self._before, self._total = report, before, total
        self.times = [time.perf_counter()]

    def __call__(self, logits: Logits, where: str) -> None:
        if np.isnan(logits[0, -1]).any():
            raise Unusable(f"it computes NaN ({where})")
        self.times.append(time.perf_counter())
        self._report("tokens", self._before + len(self.times) - 1, self._total)


def _answer(model: LanguageModel, family: Family, inputs: EncodedInputs, pace: _Pace) -> PromptAnswer:
    tokens = write_text(model, family, inputs, on_logits=pace)
    begin, first, *later = pace.times
    return PromptAnswer(
        tokens=tokens,
        ended=len(tokens) < inputs.inputs[0].most,
        first_seconds=first - begin,
        seconds=(later[-1] if later else first) - begin,
        steps=len(later),
    )

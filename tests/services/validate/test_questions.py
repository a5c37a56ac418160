"""One prompt to several models: the answers of right outputs are the fine-tuned model's, and each failure is told in place of an answer."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import peft
import psutil
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from slipway.errors import ModelExportError, ValidationError
from slipway.stage import Context
from slipway.validation.questions import BASE, FINE_TUNED, AnswerReport, ModelAnswer
from slipway_validate.questions.params import AnswerParams
from slipway_validate.questions.stage import STAGE
from support.coordinators.harness import wait_for
from support.models.family_models import make_family_adapter, make_family_model
from support.models.validation_models import Models

PROMPT = "the a of g is not in m or ag"
TEMPLATE = "{% for message in messages %}the {{ message['content'] }} is{% endfor %}"


def asked(inputs: dict[str, Path], context: Context, **params: Any) -> AnswerReport:
    given = AnswerParams(**{"prompt": PROMPT, "max_new_tokens": 12, **params})
    report = AnswerReport.read_from(STAGE.run(inputs, given, context)["answers"])
    assert [path.name for path in context.workdir.iterdir()] == ["answers"]  # the processes leave nothing
    return report


def by_name(report: AnswerReport) -> dict[str, ModelAnswer]:
    return {each.name: each for each in report.answers}


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def test_right_outputs_answer_as_base_and_adapter_and_the_base_does_not(
    tiny: Models, tiny_onnx: Path, context: Context
) -> None:
    inputs = {"base": tiny.base, "adapter": tiny.adapter, "pytorch": tiny.merged, "onnx": tiny_onnx}
    report = asked(inputs, context)
    found = by_name(report)
    assert list(found) == [BASE, FINE_TUNED, "onnx", "pytorch"]
    assert {each.status for each in report.answers} == {"done"}
    assert (report.reference, report.first_difference(found[FINE_TUNED])) == (FINE_TUNED, None)
    assert [report.first_difference(found[name]) for name in ("onnx", "pytorch")] == [0, 0]
    place = report.first_difference(found[BASE])
    assert place
    assert found[BASE].tokens[: place - 1] == found[FINE_TUNED].tokens[: place - 1]
    assert found[BASE].text != found[FINE_TUNED].text == found["onnx"].text
    for each in report.answers:
        assert each.text
        assert (0 < len(each.tokens) < 12) if each.ended else len(each.tokens) == 12
        assert each.tokens_per_second
        assert each.tokens_per_second > 1
        assert each.first_seconds
    assert (found["onnx"].runtime, found["onnx"].device, found["onnx"].computed) == ("onnxruntime", "cpu", "float32")
    assert report.prompt_tokens > 5
    assert report.read.replace(" ", "") == PROMPT.replace(" ", "")


@pytest.mark.slow
def test_an_output_that_differs_says_from_which_token_on(tiny: Models, context: Context) -> None:
    wrong = tiny.scaled("stronger", 3.0)
    report = asked({"base": tiny.base, "adapter": tiny.adapter, "pytorch": wrong}, context, models=(FINE_TUNED,))
    assert list(by_name(report)) == [FINE_TUNED, "pytorch"]
    own, theirs = by_name(report)["pytorch"].tokens, by_name(report)[FINE_TUNED].tokens
    place = report.first_difference(by_name(report)["pytorch"])
    assert place
    assert own[: place - 1] == theirs[: place - 1]
    assert own[place - 1 : place] != theirs[place - 1 : place]


def test_a_shorter_answer_differs_behind_its_end() -> None:
    whole, part = (ModelAnswer(name=name, tokens=tokens) for name, tokens in ((FINE_TUNED, (1, 2, 3)), ("a", (1, 2))))
    report = AnswerReport(prompt_tokens=1, answers=(whole, part))
    assert report.first_difference(part) == 3
    assert AnswerReport(prompt_tokens=1, answers=(part,)).first_difference(part) is None


@pytest.mark.slow
def test_a_model_without_an_adapter_is_compared_with_itself(tiny: Models, context: Context) -> None:
    report = asked({"base": tiny.merged, "pytorch": tiny.merged}, context)
    assert (list(by_name(report)), report.reference) == ([BASE, "pytorch"], BASE)
    assert report.first_difference(by_name(report)["pytorch"]) == 0


@pytest.mark.slow
def test_an_adapter_delivered_alone_answers_on_the_base(tiny: Models, context: Context) -> None:
    inputs = {"base": tiny.base, "adapter": tiny.adapter, "output.adapter": tiny.adapter}
    report = asked(inputs, context, models=(FINE_TUNED,))
    assert report.first_difference(by_name(report)["adapter"]) == 0


@pytest.mark.slow
def test_the_chat_template_writes_the_prompt_unless_it_shall_not(
    tiny: Models, tmp_path: Path, context: Context
) -> None:
    base = copied(tiny.base, tmp_path / "base")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    report = asked({"base": base}, context, prompt="g", max_new_tokens=2)
    assert report.read.split() == ["the", "g", "is"]
    again = Context(workdir=tmp_path / "again")
    again.workdir.mkdir()
    assert asked({"base": base}, again, prompt="g", max_new_tokens=2, chat=False).read.split() == ["g"]


@pytest.mark.slow
def test_an_encoder_decoder_answers_as_transformers_generates(tmp_path: Path, context: Context) -> None:
    base, adapter = make_family_model("marian", tmp_path / "base"), tmp_path / "adapter"
    make_family_adapter("marian", base, adapter)
    report = asked({"base": base, "adapter": adapter}, context, prompt="the of and to")
    ids = torch.tensor([AutoTokenizer.from_pretrained(base)("the of and to")["input_ids"]])
    plain: Any = AutoModelForSeq2SeqLM.from_pretrained(base)
    for name in (BASE, FINE_TUNED):
        model = plain if name == BASE else peft.PeftModel.from_pretrained(plain, adapter)
        wanted = model.generate(input_ids=ids, max_new_tokens=16, do_sample=False, num_beams=1)[0].tolist()
        assert list(by_name(report)[name].tokens) == wanted[1:13]
    assert report.first_difference(by_name(report)[BASE])


def test_other_families_cannot_be_asked(tmp_path: Path, context: Context) -> None:
    base = make_family_model("bert-classes", tmp_path / "base")
    with pytest.raises(ValidationError, match="a sequence classifier cannot be asked") as caught:
        STAGE.run({"base": base}, AnswerParams(prompt="one"), context)
    assert caught.value.reason == "FAMILY_UNSUPPORTED"


def test_a_prompt_that_does_not_fit_is_refused_with_its_length(tiny: Models, context: Context) -> None:
    with pytest.raises(
        ValidationError, match=r"^the prompt has \d+ tokens and up to 64 of its answer, the model takes 128"
    ) as caught:
        STAGE.run({"base": tiny.base}, AnswerParams(prompt="the a of g " * 100), context)
    assert "ask for fewer tokens" in (caught.value.remedy or "")


@pytest.mark.slow
def test_outputs_that_cannot_run_say_so_and_others_answer(tiny: Models, tmp_path: Path, context: Context) -> None:
    """One of a format without a runtime for it here, one without its file, one of NaN, one that is no model, and a right one."""
    folders = {name: tmp_path / name for name in ("coreml", "onnx", "pytorch-int8")}
    for folder in folders.values():
        folder.mkdir()
    (folders["coreml"] / "model.mlpackage").mkdir()
    (folders["pytorch-int8"] / "model.safetensors").write_bytes(b"no model")
    nan = tiny.variant("nan", lambda module: module.model.norm.weight.fill_(torch.nan))
    inputs = {"base": tiny.base, "adapter": tiny.adapter, "pytorch": tiny.merged, "pytorch-fp16": nan, **folders}
    found = by_name(asked(inputs, context, models=(FINE_TUNED,), max_new_tokens=3))
    assert found["pytorch"].tokens == found[FINE_TUNED].tokens
    assert found["coreml"].status == "not_run"
    assert found["coreml"].message
    assert (found["onnx"].status, found["onnx"].reason) == ("failed", "VALIDATION_IMPOSSIBLE")
    assert "model.onnx" in found["onnx"].message
    assert found["pytorch-int8"].status == "failed"
    assert "NaN" in found["pytorch-fp16"].message


class Running:
    """The stage in a thread, and how it ended."""

    def __init__(self, inputs: dict[str, Path], ctx: Context) -> None:
        self.report: AnswerReport | None = None
        self.error: ModelExportError | None = None
        self.ctx, self.thread = ctx, threading.Thread(target=self._run, args=(inputs, ctx))
        self.thread.start()

    def _run(self, inputs: dict[str, Path], ctx: Context) -> None:
        try:
            self.report = asked(inputs, ctx)
        except ModelExportError as error:
            self.error = error

    def runner(self, number: str) -> psutil.Process:
        """The process of the answer of this number."""

        def find() -> psutil.Process | None:
            wanted = str(self.ctx.workdir / "runs" / number)
            for each in psutil.Process().children():
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    if wanted in each.cmdline():
                        return each
            return None

        found = wait_for(find, seconds=240)
        assert isinstance(found, psutil.Process)
        return found


@pytest.mark.slow
def test_a_runtime_that_dies_is_told_by_name_and_the_next_one_answers(
    tiny: Models, tiny_onnx: Path, context: Context
) -> None:
    running = Running({"base": tiny.base, "pytorch": tiny.merged, "onnx": tiny_onnx}, context)
    running.runner("2").send_signal(signal.SIGSEGV)
    running.thread.join(240)
    assert running.report is not None
    found = by_name(running.report)
    assert (found["pytorch"].status, found["pytorch"].reason) == ("failed", "STAGE_CRASHED")
    assert "pytorch" in found["pytorch"].message
    assert {found[BASE].status, found["onnx"].status} == {"done"}


def test_cancellation_ends_the_runner(tiny: Models, context: Context) -> None:
    running = Running({"base": tiny.base}, context)
    runner = running.runner("0")
    context.cancelled.set()
    running.thread.join(240)
    assert running.error is not None
    assert running.error.reason == "CANCELLED"
    assert not runner.is_running()
    assert not any(context.workdir.iterdir())


@pytest.mark.parametrize(
    "params",
    [{"prompt": ""}, {"prompt": "a" * 20_001}, {"max_new_tokens": 0}, {"max_new_tokens": 1025}, {"models": ("other",)}, {"x": 1}],
    ids=str,
)  # fmt: skip
def test_parameters_beyond_their_limits_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        AnswerParams.model_validate_json(json.dumps({"prompt": "one", **params}))

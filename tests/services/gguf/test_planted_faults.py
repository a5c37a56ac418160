"""Faults of GGUF files that people report are each found by name: no template, wrong pre-tokenizer, rows in another order, a lost head."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from slipway.stage import Context
from slipway.validation.findings import OutputStatus, ValidationReport
from slipway.validation.texts import TextComparison
from slipway_gguf.diagnosis import explain
from slipway_gguf.runtime import load
from slipway_validate.judging import texts
from slipway_validate.params import ValidateParams
from slipway_validate.protocol.messages import TextSpec
from slipway_validate.runner.texts import compare_texts, write_texts
from slipway_validate.stage import STAGE
from support.models.gguf_faults import (
    faulty,
    in_own_order,
    save_models,
    with_other_values,
    with_the_same_head,
    with_wrong_head,
    without_head,
    write,
)

pytestmark = pytest.mark.own_process

_TEMPLATE, _PRE = {"tokenizer.chat_template": None}, {"tokenizer.ggml.pre": "gpt-2"}


class _Tiny:
    def __init__(self, root: Path, *, tied: bool = False) -> None:
        self.root = root
        self.base, self.adapter, self.merged = save_models(root, tied=tied)
        self.good = write(self.merged, root / "work")
        self.expected = root / "texts.json"
        write_texts(TextSpec(tokenizer=self.base, base=self.base, file=self.expected))

    def compared(self, folder: Path) -> TextComparison:
        found = compare_texts(load(folder, threads=1), self.expected)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> _Tiny:
    return _Tiny(tmp_path_factory.mktemp("tiny"))


def test_a_good_file_reads_text_as_transformers_does(tiny: _Tiny) -> None:
    found = tiny.compared(tiny.good)
    assert (found.different, found.rendered_otherwise, found.excused) == (0, 0, 0), found
    assert found.texts > 40
    assert found.conversations == 4  # this template takes no tools
    assert all(check.passed for check in texts.checks(found))
    assert explain(tiny.good, tiny.merged) == ""


def test_a_missing_template_is_named(tiny: _Tiny, tmp_path: Path) -> None:
    found = tiny.compared(faulty(tiny.good, tmp_path / "bad", fields=_TEMPLATE))
    assert (found.template_missing, found.different, found.rendered_otherwise) == (True, 0, 4)
    assert "no chat template" in texts.explain(found)[0]
    assert [check.name for check in texts.checks(found) if not check.passed] == ["chat_template"]


@pytest.mark.slow
def test_another_template_is_shown(tiny: _Tiny, tmp_path: Path) -> None:
    other = {"tokenizer.chat_template": "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"}
    found = tiny.compared(faulty(tiny.good, tmp_path / "bad", fields=other))
    assert not found.template_missing
    assert "a question: '<What is" in found.first_rendered


def test_a_wrong_pre_tokenizer_is_named(tiny: _Tiny, tmp_path: Path) -> None:
    found = tiny.compared(faulty(tiny.good, tmp_path / "bad", fields=_PRE))
    assert found.different > 5
    assert [check.name for check in texts.checks(found) if not check.passed] == ["tokens"]
    said, remedy = texts.explain(found)
    assert "get other tokens than by transformers, first digits, '1 12 123" in said or "first words" in said
    assert "pre-tokenizer" in remedy


def test_rows_in_another_order_are_named(tiny: _Tiny, tmp_path: Path) -> None:
    said = explain(faulty(tiny.good, tmp_path / "bad", change=in_own_order), tiny.merged)
    assert said.startswith(
        "the rows of queries and keys are not in llama.cpp's order but in transformers' (blk.0.attn_k.weight, blk.0.attn_q.weight"
    )


def test_a_lost_head_is_named(tiny: _Tiny, tmp_path: Path) -> None:
    said = explain(faulty(tiny.good, tmp_path / "bad", change=without_head), tiny.merged)
    assert said.startswith("its head is lost")


def test_another_head_than_the_tied_one_is_named(tmp_path: Path) -> None:
    tied = _Tiny(tmp_path / "tied", tied=True)
    assert explain(tied.good, tied.merged) == ""
    for name, change in (("wrong", with_wrong_head), ("same", with_the_same_head)):
        faulty(tied.good, tmp_path / name, change=change)
    assert explain(tmp_path / "same", tied.merged) == ""
    said = explain(tmp_path / "wrong", tied.merged)
    assert said.startswith("its head is not the model's: the model's is token_embd.weight, but the file has another")
    assert explain(tmp_path / "wrong", tied.base, exact=False) == said


def test_the_base_is_enough_to_name_them(tiny: _Tiny, tmp_path: Path) -> None:
    """As where the export delivers no merged model; what the adapter changed is no fault."""
    assert explain(tiny.good, tiny.base, exact=False) == ""
    turned = explain(faulty(tiny.good, tmp_path / "turned", change=in_own_order), tiny.base, exact=False)
    assert turned.startswith("the rows of queries and keys are not in llama.cpp's order")
    lost = explain(faulty(tiny.good, tmp_path / "lost", change=without_head), tiny.base, exact=False)
    assert lost.startswith("its head is lost")


def test_other_values_are_named(tiny: _Tiny, tmp_path: Path) -> None:
    said = explain(faulty(tiny.good, tmp_path / "bad", change=with_other_values), tiny.merged)
    assert said == (
        "3 tensors hold other values than the model's (blk.0.ffn_up.weight, blk.1.ffn_up.weight, output_norm.weight)"
    )


@pytest.mark.slow
def test_validation_names_faults_of_texts_and_of_weights(tiny: _Tiny, tmp_path: Path) -> None:
    """The whole stage, in processes of its own; names of levels are those of copies of one f16 file.

    No merged model is delivered beside them, so files are compared with the base: what the adapter changed is no fault.
    """
    outputs = {
        "gguf": tiny.good,
        "gguf-bf16": faulty(tiny.good, tmp_path / "a", fields=_TEMPLATE | _PRE),
        "gguf-q6_k": faulty(tiny.good, tmp_path / "b", change=in_own_order),
    }
    inputs = {"base": tiny.base, "adapter": tiny.adapter, **outputs}
    work = tmp_path / "work"
    work.mkdir()
    params = ValidateParams(effort="quick", sequence_length=48, test_samples=2, benchmark_performance=False)
    report = ValidationReport.read(STAGE.run(inputs, params, Context(workdir=work))["validation"])
    assert not [output.name for output in report.outputs if "other values" in output.explanation]
    good = report.output("gguf")
    assert good.status is OutputStatus.PASSED, good.explanation
    assert good.texts is not None
    assert good.texts.texts > 40
    named = {
        "gguf-bf16": ("no chat template", "other tokens than by transformers"),
        "gguf-q6_k": ("not in llama.cpp's order",),
    }
    for name, said in named.items():
        found = report.output(name)
        assert found.status is OutputStatus.FAILED, name
        assert all(each in found.explanation for each in said), (name, found.explanation)
    assert {check.name for check in report.output("gguf-q6_k").failed_checks} >= {"module_strength_error"}

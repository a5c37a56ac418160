"""The user's test inputs: read as what they are, refused by name, scored as the field does, and judged by the loss."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import AutoTokenizer

from slipway.errors import ValidationError
from slipway.model.configuration import ModelConfig
from slipway.model.families import (
    DECODER,
    ENCODER_DECODER,
    FAMILIES,
    FEATURE_EXTRACTION,
    MASKED_LANGUAGE_MODEL,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    Family,
)
from slipway.model.folder import ModelFolder
from slipway.proof.runtime import Unusable, UnusableInput
from slipway.stage import Context
from slipway.validation.findings import ValidationReport
from slipway_validate.answers import scores
from slipway_validate.answers.records import (
    FORMS,
    MOST_RECORDS,
    check_labels,
    choose_records,
    read_records,
    write_records,
)
from slipway_validate.answers.scores import Scorer
from slipway_validate.params import ValidateParams
from slipway_validate.protocol.inputs import Answers, EncodedInput, EncodedInputs
from slipway_validate.protocol.messages import TextSpec, TokenizeSpec
from slipway_validate.runner.sampling.encoding import encode_inputs
from slipway_validate.runner.texts import write_texts
from slipway_validate.stage import STAGE
from support.hostile.endless import GROWS, HALVES
from support.models.family_models import CASES, make_family_adapter, make_family_model
from support.models.tiny_models import save_tokenizer

NAMES = {"id2label": {"0": "bad", "1": "so so", "2": "good"}}


def read(folder: Path, text: str | bytes, name: str = "inputs.jsonl", family: Family = DECODER) -> Any:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_records(folder, [], family)


def scorer(family: Family, records: list[dict[str, Any]], config: dict[str, Any] | None = None, **more: Any) -> Scorer:
    found = read_records(None, records, family)
    assert found is not None
    encoded = EncodedInputs(inputs=more.pop("inputs", tuple(EncodedInput(ids=(1,)) for _ in found)))
    return Scorer(
        records=found, encoded=encoded, family=family, config=ModelConfig(config or {}),
        decode=lambda ids: " ".join("abcdefgh"[token] for token in ids),
    )  # fmt: skip


def loss(one: Scorer, theirs: list[tuple[float, ...]], ours: list[tuple[float, ...]]) -> dict[str, tuple[float, float]]:
    found = one.compare(Answers(answers=tuple(theirs)), Answers(answers=tuple(ours)))
    assert found is not None
    assert found.skipped == ""
    assert found.not_run == ()
    return {score.name: (score.reference, score.value) for score in found.scores}  # type: ignore[misc]


def test_files_of_three_kinds_hold_the_same(tmp_path: Path) -> None:
    records = [{"prompt": "one"}, {"prompt": "two"}]
    texts = {
        "a.jsonl": "\n".join(map(json.dumps, records)) + "\n\n",
        "a.json": json.dumps(records),
        "a.txt": "one\n\ntwo\n",
    }
    found = []
    for name, text in texts.items():
        folder = tmp_path / name.partition(".")[2]
        folder.mkdir()
        found.append(read(folder, text, name))
    assert found[0] == found[1] == found[2] == read_records(None, records, DECODER)
    assert [record.prompt for record in found[0]] == ["one", "two"]
    assert read(tmp_path, "eins\n", "b.txt", ENCODER_DECODER)[0].source == "eins"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n{"promt": "b"}', "record 2: "),
        ('{"prompt": ""}', "record 1: prompt"),
        ('{"prompt": 1}', "record 1: prompt"),
        ('{"prompt": "a", "match": "^(a+)+$"}', "match"),
        ('{"prompt": "a", "expected": "b", "max_new_tokens": 100000}', "max_new_tokens"),
        ("[1, 2]", "record 1"),
        ("not json", "line 1"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"prompt": NaN}', "not a finite number"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested"),
        (b'{"prompt": "\xff"}', "utf-8"),
        ("", "0 records"),
        ('{"prompt": "a"}\n' * (MOST_RECORDS + 1), f"{MOST_RECORDS + 1} records"),
        (json.dumps({"prompt": "a" * 200_000}), "record 1: prompt"),
    ],
    ids=[str(number) for number in range(14)],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        read(tmp_path, text)
    assert said in caught.value.message
    assert len(caught.value.message) < 700
    assert caught.value.reason == "VALIDATION_IMPOSSIBLE"
    assert caught.value.remedy


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ValidationError, match="pipe"):
        read_records(tmp_path, [], DECODER)
    with pytest.raises(ValidationError, match=r"a.jsonl.*b.json|exactly one"):
        read(tmp_path, "[]", "b.json")


def test_inputs_that_are_not_answered_are_counted() -> None:
    warnings: list[str] = []
    for count, expected in ((100, 100), (101, 100)):
        params = ValidateParams(test_inputs=[{"prompt": "a"}] * count)
        assert len(choose_records({}, ModelConfig({}), DECODER, params, warn=warnings.append)) == expected
    assert warnings == ["100 of 101 test inputs are answered: the first ones"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_family_has_its_own_form_or_answers_none(family: Family, tmp_path: Path) -> None:
    if family.name not in FORMS:
        assert read_records(None, [{"text": "a"}], family) is None
        return
    form = json.loads(FORMS[family.name][1].replace("…", "word"))
    (tmp_path / "inputs.json").write_text(json.dumps([form]))
    (record,) = read_records(tmp_path, [], family) or ()
    assert record.format_expected()
    with pytest.raises(ValidationError, match="record 1"):
        read_records(None, [{"unknown": 1}], family)


def test_labels_that_the_model_lacks_are_refused() -> None:
    records = read_records(None, [{"text": "a", "label": "good"}, {"text": "b", "label": 1}], SEQUENCE_CLASSIFIER)
    check_labels(records or (), NAMES)
    wrong = read_records(None, [{"text": "a", "label": "great"}], SEQUENCE_CLASSIFIER)
    with pytest.raises(ValidationError, match="great"):
        check_labels(wrong or (), NAMES)
    with pytest.raises(ValidationError, match="not a number"):
        check_labels(wrong or (), {"id2label": {"0": "LABEL_0"}})


def test_expected_answers_of_a_decoder() -> None:
    one = scorer(
        DECODER,
        [{"prompt": "p", "expected": "A  b"}, {"prompt": "p", "expected": "c", "match": "contains"}, {"prompt": "p"}],
    )
    theirs, ours = [(0, 1), (1, 2, 3), (4,)], [(0, 1), (1, 3), (5,)]
    assert loss(one, theirs, ours) == {"as_expected": (1.0, 0.5)}
    found = one.compare(Answers(answers=tuple(theirs)), Answers(answers=tuple(ours)))
    assert found is not None
    assert (found.inputs, found.with_expected, found.agreement) == (3, 2, pytest.approx(1 / 3))
    assert (found.examples[0].output, found.examples[0].reference) == ("b d", "b c d")  # what differs comes first


def test_labels_of_texts() -> None:
    records = [{"text": "a", "label": "good"}, {"text": "b", "label": 1}, {"text": "c", "label": "bad"}]
    one = scorer(SEQUENCE_CLASSIFIER, records, NAMES)
    right, half = [(0, 1, 9), (0, 9, 1), (9, 0, 1)], [(0, 1, 9), (9, 0, 1), (9, 0, 1)]
    found = loss(one, right, half)
    assert found["accuracy"] == (1.0, pytest.approx(2 / 3))
    assert found["f1"] == (1.0, pytest.approx((1 + 0 + 2 / 3) / 3))  # of good, so so, bad


def test_several_labels_and_scores_of_texts() -> None:
    several = NAMES | {"problem_type": "multi_label_classification"}
    one = scorer(
        SEQUENCE_CLASSIFIER, [{"text": "a", "label": ["bad", "good"]}, {"text": "b", "label": ["so so"]}], several
    )
    assert loss(one, [(1, 0, 0, 1, 1, 0), (0, 1, 1, 0, 0, 1)], [(1, 0, 0, 1, 0, 1), (0, 1, 1, 0, 0, 1)]) == {
        "f1": (1.0, pytest.approx(0.8)),
        "accuracy": (1.0, 0.5),
    }
    scale = {"id2label": {"0": "LABEL_0"}}
    one = scorer(SEQUENCE_CLASSIFIER, [{"text": text, "label": number} for number, text in enumerate("abc")], scale)
    found = loss(one, [(0,), (1,), (3,)], [(0,), (3,), (1,)])
    assert found["spearman"] == (pytest.approx(1.0), pytest.approx(0.5))


def test_labels_of_words() -> None:
    config = {"id2label": {"0": "O", "1": "NAME"}}
    one = scorer(TOKEN_CLASSIFIER, [{"tokens": ["a", "b", "c", "d"], "labels": ["O", "NAME", "NAME", "O"]}], config)
    found = loss(one, [(0, 1, 1, 0)], [(0, 1, 0, -1)])  # the last was cut off
    assert found == {"f1": (1.0, pytest.approx(2 / 3)), "accuracy": (1.0, 0.75)}


def test_answers_to_questions() -> None:
    context = "The cat sat. A dog ran."
    offsets = ((0, 3), (4, 7), (8, 11), (13, 14), (15, 18))
    one = scorer(
        QUESTION_ANSWERING,
        [{"question": "Who sat?", "context": context, "answers": ["cat", "the Cat!"]}],
        inputs=(EncodedInput(ids=(1,), keep=(0, 1, 2, 3, 4), offsets=offsets),),
    )
    assert loss(one, [(0, 1)], [(1, 2)]) == {"f1": (1.0, pytest.approx(2 / 3)), "exact_match": (1.0, 0.0)}


def test_similarities_of_pairs() -> None:
    records = [{"sentence1": "a", "sentence2": "b", "score": number} for number in (0, 1, 2.5)]
    one = scorer(FEATURE_EXTRACTION, records)
    found = loss(one, [(0.1,), (0.2,), (0.9,)], [(0.1,), (0.9,), (0.2,)])
    assert found["spearman"] == (pytest.approx(1.0), pytest.approx(0.5))
    constant = loss(one, [(0.5,), (0.5,), (0.5,)], [(0.5,), (0.5,), (0.5,)])
    assert constant == {}


def test_translations() -> None:
    same = scores.translation(["the cat sat on the mat today"], ["the cat sat on the mat today"])
    other = scores.translation(["the cat lay on a mat today"], ["the cat sat on the mat today"])
    assert same == {"chrf": pytest.approx(1.0), "bleu": pytest.approx(1.0)}
    assert 0 < other["bleu"] < other["chrf"] < 1


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Installed or not, the import system decides; nothing of the scores is replaced.
    monkeypatch.setattr("slipway_validate.answers.scores.find_spec", lambda name: None)
    found, missing = scores.run(lambda: scores.translation(["a"], ["a"]))
    assert found == {}
    assert missing == "chrf, bleu: sacrebleu is not installed: pip install 'slipway-ml[metrics]'"


def test_what_was_skipped_is_said() -> None:
    one = scorer(DECODER, [{"prompt": "p"}])
    found = one.compare(Answers(answers=((1,),)), Answers(skipped="the engine accepts too few tokens"))
    assert found is not None
    assert found.skipped == "the engine accepts too few tokens"
    assert one.compare(None, Answers()) is None
    assert read_records(None, [{"text": "a"}], MASKED_LANGUAGE_MODEL) is None


def encoded(kind: str, folder: Path, records: list[dict[str, Any]]) -> EncodedInputs:
    """Encode records with the tokenizer of a small model."""
    model = make_family_model(kind, folder / "base")
    family = ModelConfig.read(model).family
    assert family is not None
    path = write_records(read_records(None, records, family), folder / "records.json")
    spec = TokenizeSpec(
        tokenizer=model, model=model, family=family.name, text=path or folder, windows=1, length=16, seed=0,
        samples=folder / "samples", records=path,
    )  # fmt: skip
    return encode_inputs(AutoTokenizer.from_pretrained(model), spec, ModelFolder.open(model))


def test_the_answer_to_a_long_source_is_not_cut(tmp_path: Path) -> None:
    found = encoded("marian", tmp_path, [{"source": "return a new string " * 500, "max_new_tokens": 20}])
    assert (len(found.inputs[0].ids) > 40, found.inputs[0].most) == (True, 20)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        pytest.param(GROWS, "needs more than 1.1 GB of memory", marks=pytest.mark.slow),
        (HALVES, "half of a character"),
    ],
)
def test_a_template_that_writes_no_prompt_is_said(tmp_path: Path, template: str, said: str) -> None:
    """Of the test inputs, and of the texts that runtimes read."""
    model = make_family_model("qwen3", tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    family = ModelConfig.read(model).family
    assert family is not None
    path = write_records(read_records(None, [{"prompt": "one", "chat": True}], family), tmp_path / "records.json")
    assert path is not None
    spec = TokenizeSpec(
        tokenizer=model, model=model, family=family.name, text=path, windows=1, length=16, seed=0,
        samples=tmp_path / "samples", records=path,
    )  # fmt: skip
    with pytest.raises(UnusableInput, match=f"test input 1 cannot be encoded: .*{said}"):
        encode_inputs(tokenizer, spec, ModelFolder.open(model))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    reading = TextSpec(tokenizer=tmp_path / "tokenizer", base=tmp_path / "tokenizer", file=tmp_path / "texts.json")
    if template == GROWS:
        with pytest.raises(Unusable, match=said):
            write_texts(reading)
    else:  # as a template that refuses every conversation
        write_texts(reading)
        assert json.loads(reading.file.read_text())["conversations"] == []


def test_an_input_that_cannot_be_given_to_the_model_is_named_with_its_remedy(tmp_path: Path) -> None:
    base, adapter = make_family_model("qwen3", tmp_path / "base"), tmp_path / "adapter"
    make_family_adapter("qwen3", base, adapter)
    params = ValidateParams(sequence_length=16, test_samples=1, greedy_prompts=0, benchmark_performance=False)
    given = params.model_copy(
        update={"test_inputs": ({"prompt": "one", "max_new_tokens": 4}, {"prompt": "value " * 5000})}
    )
    (tmp_path / "work").mkdir()
    with pytest.raises(ValidationError, match=r"^test input 2 has .* the model takes") as caught:
        STAGE.run({"base": base, "adapter": adapter, "pytorch": base}, given, Context(workdir=tmp_path / "work"))
    assert "shorten it" in (caught.value.remedy or "")


def validated(kind: str, folder: Path, records: list[dict[str, Any]]) -> ValidationReport:
    """Validate a right output and the base alone, without the adapter, by test inputs in a file."""
    base, adapter = make_family_model(kind, folder / "base"), folder / "adapter"
    make_family_adapter(kind, base, adapter)
    merged, given, work = folder / "merged", folder / "inputs", folder / "work"
    model = type(CASES[kind].model()).from_pretrained(base)
    peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(merged)
    save_tokenizer(merged)
    given.mkdir()
    work.mkdir()
    (given / "inputs.jsonl").write_text("\n".join(map(json.dumps, records)))
    params = ValidateParams(sequence_length=16, test_samples=2, greedy_prompts=0, benchmark_performance=False)
    inputs = {"base": base, "adapter": adapter, "test_inputs": given, "pytorch": merged, "pytorch-base": base}
    return ValidationReport.read(STAGE.run(inputs, params, Context(workdir=work))["validation"])


WORDS = [
    "if the value is a list",
    "return a new string",
    "the class of an object",
    "import the module",
    "a loop that ends",
]
OF_FAMILIES: dict[str, list[dict[str, Any]]] = {
    "qwen3": [{"prompt": text, "expected": "never", "max_new_tokens": 8} for text in WORDS],
    "marian": [{"source": text, "target": text, "max_new_tokens": 8} for text in WORDS],
    "bert-classes": [{"text": text, "label": f"LABEL_{number % 3}"} for number, text in enumerate(WORDS)],
    "bert-tokens": [{"tokens": text.split(), "labels": ["LABEL_0"] * len(text.split())} for text in WORDS],
    "roberta-questions": [{"question": "what is it", "context": text, "answers": [text]} for text in WORDS],
    "bert-features": [{"sentence1": text, "sentence2": WORDS[0], "score": n} for n, text in enumerate(WORDS)],
}
SCORES = {
    "qwen3": {"as_expected"}, "marian": {"chrf", "bleu"}, "bert-classes": {"accuracy", "f1"}, "bert-tokens": {"accuracy", "f1"},
    "roberta-questions": {"f1", "exact_match"}, "bert-features": {"spearman", "pearson"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_FAMILIES)
def test_every_family_answers_beside_the_reference(kind: str, tmp_path: Path) -> None:
    report = validated(kind, tmp_path, OF_FAMILIES[kind])
    merged, base = report.output("pytorch").answers, report.output("pytorch-base").answers
    assert merged is not None
    assert base is not None
    assert (merged.inputs, merged.with_expected, merged.skipped) == (5, 5, "")
    assert {score.name for score in merged.scores} == SCORES[kind]
    assert all(score.value == pytest.approx(score.reference) for score in merged.scores)
    assert report.output("pytorch").passed, report.output("pytorch").explanation
    assert len([check for check in report.output("pytorch").checks if check.name.startswith("answers.")]) == 1
    if kind != "bert-features":
        assert merged.agreement == 1
        assert base.agreement is not None
        assert base.agreement < 1 or kind == "bert-tokens"


def test_scores_have_the_values_that_a_hand_computes() -> None:
    """BLEU: 4/5, 3/4, 2/3 and 1/2 of the n-grams; chrF: 3/4, 2/3, 1/2 and none; ties share their mean rank."""
    assert scores.translation(["a b c d e"], ["a b c d f"])["bleu"] == pytest.approx(
        (4 / 5 * 3 / 4 * 2 / 3 / 2) ** 0.25
    )
    assert scores.translation(["abcd"], ["abce"])["chrf"] == pytest.approx((3 / 4 + 2 / 3 + 1 / 2) / 4)
    assert scores.correlations([1, 2, 3], [1, 2, 4])["pearson"] == pytest.approx(3 / (28 / 3) ** 0.5)
    assert scores.correlations([1, 1, 2], [1, 2, 3])["spearman"] == pytest.approx(0.75**0.5)
    assert scores.spans(["the red car"], [["a red bus", "green"]]) == {"f1": 0.5, "exact_match": 0.0}

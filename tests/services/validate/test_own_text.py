"""The adapter is judged on text like its own: beside the run, and the user's test inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from slipway.base_match.match import measure
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, ENCODER_DECODER, SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER, Family
from slipway.stage import Context
from slipway.validation.findings import Reference, ValidationInputs, ValidationReport
from slipway.validation.speed import Engine
from slipway_validate.answers.own_text import write_own_text
from slipway_validate.answers.records import LabelledText, Prompted
from slipway_validate.params import SampleParams
from slipway_validate.reference.files import FILE, ReferenceFile
from slipway_validate.reference.stage import STAGE
from support.models.validation_models import TEXT, VOCABULARY, make_base, save_tokenizer

PARAMS = SampleParams(sequence_length=32, test_samples=6, max_new_tokens=2)
WORDS = TEXT.split()
PASSAGES = [" ".join(WORDS[at : at + 60]) for at in range(0, 1200, 60)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and an adapter that was trained on PASSAGES for a moment."""
    folder = tmp_path_factory.mktemp("trained")
    base = make_base()
    base.save_pretrained(folder / "base")
    save_tokenizer(folder / "base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base", trust_remote_code=False)
    torch.manual_seed(7)
    tuned = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.Adam([each for each in tuned.parameters() if each.requires_grad], lr=2e-2)
    rows = torch.tensor([tokenizer(passage)["input_ids"][:60] for passage in PASSAGES])
    for _ in range(30):
        loss = tuned(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def referenced(work: Path, inputs: dict[str, Path], params: SampleParams = PARAMS) -> ReferenceFile:
    work.mkdir()
    made = STAGE.run(inputs, params, Context(workdir=work))["reference"]
    return ReferenceFile.model_validate_json((made / FILE).read_bytes())


def judged(file: ReferenceFile) -> Any:
    figures = file.figures
    reference = Reference(
        description="base + adapter",
        engine=Engine(runtime="transformers"),
        perplexity=figures.perplexity,
        base_perplexity=figures.base_perplexity,
        gain_per_window=figures.gain_per_window,
        adapter_effect_kl=0.3,
        evidence=figures.evidence,
    )
    inputs = ValidationInputs(
        samples=6,
        sequence_length=32,
        tokens=192,
        requested_samples=6,
        vocabulary=10**9,  # the base is not trained, so that it predicts no better than guessing
        family=file.family,
        seed=0,
        prompts=0,
        new_tokens=0,
        text_source=file.text_source,
        held_out=file.held_out,
    )
    return measure(ValidationReport(reference=reference, inputs=inputs, outputs=()))


@pytest.mark.slow
def test_the_runs_own_text_answers_where_the_built_in_text_does_not(trained: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = trained
    own = tmp_path / "own"
    own.mkdir()
    (own / "train.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in PASSAGES))
    without = judged(referenced(tmp_path / "without", {"base": base, "adapter": adapter}))
    assert not without.helps
    found = judged(referenced(tmp_path / "with", {"base": base, "adapter": adapter, "own_text": own}))
    assert found.helps, found.reason
    assert "on text beside the run (train.jsonl)" in found.reason


@pytest.mark.slow
def test_test_inputs_with_answers_are_text_of_the_adapters_kind(trained: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = trained
    asked = [{"prompt": each[:120], "expected": each[120:]} for each in PASSAGES]
    params = PARAMS.model_copy(update={"test_inputs": asked})
    found = judged(referenced(tmp_path / "work", {"base": base, "adapter": adapter}, params))
    assert found.helps, found.reason
    assert "on your test inputs" in found.reason


def written(
    tmp_path: Path, family: Family, data: str | bytes, *, name: str, labels: dict[str, str] | None = None
) -> list[Any]:
    own = tmp_path / "own"
    own.mkdir()
    (own / name).write_bytes(data.encode() if isinstance(data, str) else data)
    warnings: list[str] = []
    inputs, config = {"adapter": tmp_path, "own_text": own}, ModelConfig({"id2label": labels or {}})
    file = tmp_path / "written.json"
    write_own_text(inputs, (), config, family, file, seed=0, warn=warnings.append)
    assert not warnings
    return next(iter(json.loads(file.read_text()).values())) if file.is_file() else []


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LABELS = {"0": "bad", "1": "good"}


@pytest.mark.parametrize(
    ("family", "row", "found"),
    [
        (DECODER, {"text": "a"}, {"text": "a"}),
        (DECODER, {"messages": CHAT}, {"messages": CHAT}),
        (
            DECODER,
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"messages": CHAT},
        ),
        (DECODER, {"instruction": "a", "output": "b"}, {"text": "a\nb", "messages": CHAT}),
        (ENCODER_DECODER, {"translation": {"en": "a", "de": "b"}}, {"source": "a", "target": "b"}),
        (SEQUENCE_CLASSIFIER, {"text": "a", "label": 1}, {"text": "a", "labels": [1]}),
        (SEQUENCE_CLASSIFIER, {"sentence": "a", "label": "good"}, {"text": "a", "labels": [1]}),
        (TOKEN_CLASSIFIER, {"tokens": ["a", "b"], "ner_tags": [0, 1]}, {"tokens": ["a", "b"], "labels": [0, 1]}),
        (SEQUENCE_CLASSIFIER, {"text": "a", "label": "unknown"}, None),
        (DECODER, {"messages": "a"}, None),
        (DECODER, 3, None),
    ],
)
def test_rows_of_many_forms_are_read(family: Family, row: Any, found: Any, tmp_path: Path) -> None:
    given = written(tmp_path, family, json.dumps(row) + "\n", name="train.jsonl", labels=LABELS)
    assert given == ([found] if found else [])


@pytest.mark.parametrize("form", ["list.json", "object.json", "rows.parquet"])
@pytest.mark.parametrize(
    ("family", "row", "found"),
    [
        (
            DECODER,
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"messages": CHAT},
        ),
        (TOKEN_CLASSIFIER, {"tokens": ["a", "b"], "ner_tags": [0, 1]}, {"tokens": ["a", "b"], "labels": [0, 1]}),
    ],
)
def test_files_that_are_decoded_whole_are_read_as_lines_are(
    family: Family, row: Any, found: Any, form: str, tmp_path: Path
) -> None:
    if form.endswith(".parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        sink = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.Table.from_pylist([{**row, "other": b"x"}]), sink)
        data = sink.getvalue().to_pybytes()
    else:
        data = json.dumps([row] if form == "list.json" else {"version": 1, "data": [row]}).encode()
    assert written(tmp_path, family, data, name=form, labels=LABELS) == [found]


def test_a_plain_text_is_cut_into_pieces(tmp_path: Path) -> None:
    assert len(written(tmp_path, DECODER, "word " * 1000, name="train.txt")) > 1


@pytest.mark.parametrize("data", ["{", "[1, 2", "\x00"])
def test_a_damaged_file_is_a_warning(data: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "train.json").write_text(data)
    warnings: list[str] = []
    inputs = {"adapter": tmp_path, "own_text": own}
    write_own_text(inputs, (), ModelConfig({}), DECODER, tmp_path / "written.json", seed=0, warn=warnings.append)
    assert len(warnings) == 1
    assert "train.json beside the run was not used" in warnings[0]
    assert not (tmp_path / "written.json").exists()


def test_records_of_test_inputs_are_taken_with_their_answers(tmp_path: Path) -> None:
    inputs, config = {"adapter": tmp_path}, ModelConfig({"id2label": LABELS})
    records = (Prompted(prompt="a"), Prompted(prompt="a", expected="b"))
    write_own_text(inputs, records, config, DECODER, tmp_path / "w.json", seed=0, warn=lambda _: None)
    assert json.loads((tmp_path / "w.json").read_text()) == {"your test inputs": [{"text": "a\nb", "messages": CHAT}]}
    label = (LabelledText(text="a", label="good"),)
    write_own_text(inputs, label, config, SEQUENCE_CLASSIFIER, tmp_path / "w.json", seed=0, warn=lambda _: None)
    assert json.loads((tmp_path / "w.json").read_text()) == {"your test inputs": [{"text": "a", "labels": [1]}]}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text classifier and an adapter that learned to tell two words."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=2,
        id2label={0: "bad", 1: "good"},
        label2id={"bad": 0, "good": 1},
    )
    base = transformers.BertForSequenceClassification(config)
    base.save_pretrained(folder / "base")
    save_tokenizer(folder / "base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base", trust_remote_code=False)
    tuned = get_peft_model(base, LoraConfig(r=4, task_type="SEQ_CLS", target_modules=["query", "value"]))
    optimizer = torch.optim.Adam([each for each in tuned.parameters() if each.requires_grad], lr=2e-2)
    rows = torch.tensor([tokenizer(text)["input_ids"] for text, _ in EXAMPLES])
    wanted = torch.tensor([label for _, label in EXAMPLES])
    for _ in range(40):
        tuned(input_ids=rows, labels=wanted).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


EXAMPLES = [(f"the {'a' if place % 2 else 'b'} of {'cdef'[place % 4]} is not in m", place % 2) for place in range(16)]


@pytest.mark.slow
def test_a_classifier_is_judged_by_its_labels(classifier: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = classifier
    own = tmp_path / "own"
    own.mkdir()
    texts = (
        dict(EXAMPLES)
        | {f"{text} or n": label for text, label in EXAMPLES}
        | {f"{text} or o": label for text, label in EXAMPLES}
    )
    (own / "train.jsonl").write_text(
        "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in texts.items())
    )
    found = judged(referenced(tmp_path / "with", {"base": base, "adapter": adapter, "own_text": own}))
    assert found.helps, found.reason
    assert "12 labels of text beside the run" in found.reason
    without = judged(referenced(tmp_path / "without", {"base": base, "adapter": adapter}))
    assert without.reason.startswith("not enough evidence, because a text alone does not tell")

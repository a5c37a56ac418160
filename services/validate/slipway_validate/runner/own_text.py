"""Measure what the adapter does on text like that of its training: what it saves, or how many labels it finds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipway.documents.reader import Document, Purpose
from slipway.documents.rendering import Contents, Renderer, Writer
from slipway.files.json_documents import LARGEST_LIST, read_json
from slipway.model.families import Comparison
from slipway.model.folder import ModelFolder
from slipway.proof.numerics import Ints, Logits, finite, perplexity_of, window_losses
from slipway.proof.runtime import EVIDENCE_FILE, OWN_FILE, OWN_FOLDER, Samples
from slipway.validation.findings import AdapterEvidence
from slipway_validate.cases import find_family, longest_text
from slipway_validate.protocol.messages import RunSpec, TokenizeSpec
from slipway_validate.runner.collect import Collector
from slipway_validate.runner.sampling.making import cut_windows, decoder_inputs, mask_tokens


def make_own_samples(tokenizer: Any, spec: TokenizeSpec, model: ModelFolder) -> None:
    """Write the samples of each text, one by one, because lengths differ; a text that gives none is left out."""
    file = spec.text.with_name(OWN_FILE)
    if not file.is_file():
        return
    folder = spec.samples.with_name(OWN_FOLDER)
    with Renderer(tokenizer, Purpose.OWN_TEXT) as renderer:
        writer: Writer = renderer if getattr(tokenizer, "chat_template", None) else Contents()
        try_samples = partial(_try_samples, tokenizer, spec=spec, model=model, writer=writer)
        for place, (name, rows) in enumerate(read_json(file, largest=LARGEST_LIST).items()):
            made = [each for row in rows if (each := try_samples(row)) is not None]
            for number, samples in enumerate(made):
                samples.write(folder / str(place) / f"{number:03}")
            if made:
                (folder / str(place) / "name").write_text(name, encoding="utf-8")


def _try_samples(
    tokenizer: Any, row: Mapping[str, Any], *, spec: TokenizeSpec, model: ModelFolder, writer: Writer
) -> Samples | None:
    try:
        return _make_samples(tokenizer, row, spec=spec, model=model, writer=writer)
    except Exception:  # noqa: BLE001 - the text is too short, or a tokenizer's code raises anything: other texts may do
        return None


def _make_samples(
    tokenizer: Any, row: Mapping[str, Any], *, spec: TokenizeSpec, model: ModelFolder, writer: Writer
) -> Samples | None:
    family = find_family(spec.family)
    longest = min(longest_text(model.config, family), 512)
    match family.comparison:
        case Comparison.CLASSES if "tokens" in row:
            return _token_samples(tokenizer, row, longest)
        case Comparison.CLASSES:
            ids = tokenizer(row["text"], truncation=True, max_length=longest)["input_ids"]
            return Samples(_row(ids), labels=_row(row["labels"]))
        case Comparison.TEACHER_FORCED:
            source = tokenizer(row["source"], truncation=True, max_length=longest)["input_ids"]
            labels = _row(tokenizer(text_target=row["target"], truncation=True, max_length=longest)["input_ids"])
            return Samples(decoder_inputs(labels, model), source=_row(source), labels=labels)
    document = Document("", text=row.get("text", ""), messages=tuple(row.get("messages", ())))
    windows = cut_windows(tokenizer, writer.text(document), spec=spec.model_copy(update={"windows": 1}))
    if family.comparison is Comparison.MASKED_TOKENS:
        return mask_tokens(tokenizer, windows, spec)
    return Samples(windows, labels=windows[:, 1:])


def _row(values: Any) -> Ints:
    return np.array([values], dtype=np.int64)


def _token_samples(tokenizer: Any, row: Mapping[str, Any], longest: int) -> Samples | None:
    """Return samples whose results are those of the first token of each word."""
    encoded = tokenizer(row["tokens"], is_split_into_words=True, truncation=True, max_length=longest)
    words = encoded.word_ids()
    first = [place for place, word in enumerate(words) if word is not None and word not in words[:place]]
    if not first:
        return None
    labels = [row["labels"][words[place]] for place in first]
    return Samples(_row(encoded["input_ids"]), positions=_row(first), labels=_row(labels))


def measure_own_text(model: Any, spec: RunSpec, folder: Path, *, report: Callable[[str, int, int], None]) -> None:
    """Compute each text with and without the adapter, and write what it does there."""
    evidence = []
    for texts in sorted(spec.samples.with_name(OWN_FOLDER).glob("*")):
        samples = [Samples.read(each) for each in sorted(texts.iterdir()) if each.is_dir()]
        compute = partial(_results, model, spec, report=report)
        jobs = [partial(compute, each, folder / f"own_{number}.npy") for number, each in enumerate(samples)]
        bare = [
            partial(compute, each, folder / f"own_{number}_base.npy", bare=True) for number, each in enumerate(samples)
        ]
        results = model.together([*jobs, *bare])
        tuned, plain = results[: len(samples)], results[len(samples) :]
        name = (texts / "name").read_text(encoding="utf-8")
        evidence.append(_evidence(name, spec, samples, tuned=tuned, plain=plain).model_dump(mode="json"))
    if evidence:
        (folder / EVIDENCE_FILE).write_text(json.dumps(evidence), encoding="utf-8")


def _results(
    model: Any,
    spec: RunSpec,
    samples: Samples,
    file: Path,
    *,
    report: Callable[[str, int, int], None],
    bare: bool = False,
) -> tuple[float, list[int]]:
    """Return the loss of one text, and the number of the best label at each place; ``bare`` is without the adapter."""
    with model.without_adapter() if bare else nullcontext():
        Collector(model, spec.model_copy(update={"cases": ()}), samples, file.parent, report=report).windows(file.name)
    values: Logits = np.load(file)
    file.unlink()
    assert samples.labels is not None
    return float(window_losses(values, samples.labels)[0]), [int(best) for best in values[0].argmax(axis=-1)]


def _evidence(
    name: str,
    spec: RunSpec,
    samples: list[Samples],
    *,
    tuned: list[tuple[float, list[int]]],
    plain: list[tuple[float, list[int]]],
) -> AdapterEvidence:
    if find_family(spec.family).comparison is Comparison.CLASSES:
        wanted = [int(label) for each in samples for label in (each.labels[0] if each.labels is not None else ())]
        given = [label for _, labels in tuned for label in labels]
        correct = sum(one == other for one, other in zip(wanted, given, strict=True))
        return AdapterEvidence(text=name, labels=len(wanted), correct=correct, commonest=max(Counter(wanted).values()))
    losses, base = (np.array([loss for loss, _ in each]) for each in (tuned, plain))
    return AdapterEvidence(
        text=name,
        perplexity=perplexity_of(losses),
        base_perplexity=perplexity_of(base),
        gain_per_window=tuple(finite(gain) for gain in base - losses),
    )

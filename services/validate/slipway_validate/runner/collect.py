"""Run one model over all samples and cases, and select the results to compare; the same code for every runtime and family."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from slipway.model.families import DECODER, SEQUENCE_CLASSIFIER, Comparison, Family
from slipway.proof.numerics import Ints, Logits
from slipway.proof.runtime import (
    LanguageModel,
    Samples,
    Source,
    Step,
    Unusable,
    padded,
    positions_of,
    run_segments,
    segments_within,
    source_of,
)
from slipway_validate.cases import DECODE, find_family, native_case
from slipway_validate.protocol.messages import Case, CaseRow, LongResult, LongSpec, RunSpec, case_file, plain_file
from slipway_validate.runner.generation.generating import continue_greedily, continue_long

BATCH_VALUES = 1 << 24
"""Largest number of results per call, which bounds memory; a call computes at least one window."""
Report = Callable[[str, int, int], None]
"""Function that is called with phase, done and total."""

NOWHERE = np.float32(-1e30)
"""Logit of a position that a shorter row lacks: its probability is 0."""

RowSelector = Callable[[Logits, Ints], list[Logits]]
"""Function from a batch's results and mask (B, L) to the compared results of each row, (P, V)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that are computed together. ids, mask: (B, L)."""

    ids: Ints
    mask: Ints
    source: Source | None = None

    def step(self) -> Step:
        """Return the call that computes all of it."""
        return Step(self.ids, self.mask, positions_of(self.mask), source=self.source, final=True)

    def part(self, start: int, count: int) -> Batch:
        """Return some of the rows with the padding of the whole batch."""
        rows, source = slice(start, start + count), self.source
        if source is not None:
            source = Source(source.values[rows], None if source.mask is None else source.mask[rows])
        return Batch(self.ids[rows], self.mask[rows], source)


class _WindowFile:
    """The results of all windows, (N, P, V), which are written as they come.

    Args:
        path: The file; it is made when the first results show their shape.
        count: Number of windows.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._count = path, count
        self._values: np.memmap[tuple[int, int, int], np.dtype[np.float32]] | None = None

    def write(self, rows: list[int], values: Logits, columns: slice, *, places: int) -> None:
        """Write results of consecutive windows; ``places`` is the P of all columns, 0 for that of these values."""
        if self._values is None:
            shape = (self._count, places or values.shape[1], values.shape[2])
            self._values = open_memmap(self._path, mode="w+", dtype=np.float32, shape=shape)
        self._values[rows[0] : rows[-1] + 1, columns] = values

    def close(self) -> None:
        """Write what is not on the disk yet."""
        if self._values is not None:
            self._values.flush()


class Collector:
    """Computes results and continuations of one model and writes them into a folder.

    Attributes:
        folder: Folder of the results.
        non_finite: Number of values so far that are NaN or infinite, without padding.
        first_non_finite: Description of the place of the first of them.
        skipped: Cases that do not apply to the model, with the reason.
        vocabulary: Number of values of a result, 0 until one is computed.
    """

    def __init__(self, model: LanguageModel, spec: RunSpec, samples: Samples, folder: Path, *, report: Report) -> None:
        self._model = model
        self._family = find_family(spec.family)
        self._samples = samples
        self._padding_token = spec.padding_token
        self._cases_known, self._shapes = spec.cases_known, {case.name for case in spec.cases}
        self._read = choose_row_selector(self._family)
        self.folder = folder
        self._write = spec.write_logits
        self._report = report
        self.non_finite = 0
        self.first_non_finite = ""
        self.skipped: dict[str, str] = {}
        self.vocabulary = 0
        self._native = native_case(self._family, *samples.tokens.shape)
        self._done: Case | None = None

    def windows(self, file: str) -> None:
        """Write the results of every window, each from one plain pass."""
        count, length = self._samples.tokens.shape
        output = _WindowFile(self.folder / file, count) if self._write else None
        start = 0
        if not self.vocabulary:  # the first window shows the width of results, which determines the largest batch
            self._compute_windows([0], output)
            start = 1
        size = max(1, min(BATCH_VALUES // (length * self.vocabulary), self._model.bounds.batch))
        parts = [list(range(at, min(count, at + size))) for at in range(start, count, size)]
        self._model.together([partial(self._compute_windows, rows, output) for rows in parts])
        if output is not None:
            output.close()

    def _compute_windows(self, rows: list[int], output: _WindowFile | None) -> None:
        positions, (count, length) = self._samples.positions, self._samples.tokens.shape
        batch, segments = self._batch_windows(rows), segments_within(length, self._model.bounds)
        every = per_token(self._family) and positions is None
        for columns, results in run_segments(self._model, batch.ids, batch.mask, segments, source=batch.source):
            self._count_non_finite(results, f"windows {rows[0]} to {rows[-1]}")
            self.vocabulary = results.shape[-1]
            values = results if positions is None else results[np.arange(len(rows))[:, None], positions[rows]]
            if output is not None:
                output.write(rows, values, columns if every else slice(None), places=length if every else 0)
        self._report("windows", rows[-1] + 1, count)

    def native_case(self) -> None:
        """Write the results of a padded batch in the model's own data type, before others are compared in float32.

        If the comparison uses the same type, a shape case takes these results too.
        """
        self.case(self._native)
        engine = self._model.engine
        if engine.native_dtype == engine.compute_dtype:
            self._done = self._native

    def case(self, case: Case) -> None:
        """Write the results of one shape case without padding.

        A runtime with a smaller largest batch gets a few rows at a time, with the padding of the whole batch.
        """
        reason = self._find_skip_reason(case)
        if reason:
            self.skipped[case.name] = reason
            return
        if self._done is not None and case == self._done.model_copy(update={"name": case.name}):
            if self._write:
                shutil.copyfile(self.folder / case_file(self._done.name), self.folder / case_file(case.name))
            return
        # The case through the cache is always computed: a step may use other kernels than a whole text.
        if self._cases_known and not case.embedding and case.name in self._shapes and case.name != DECODE:
            self.skipped[case.name] = self._cases_known
            return
        batch, step = self._batch(case, case.rows), self._model.bounds.batch
        parts = [batch.part(start, step) for start in range(0, len(batch.ids), step)]
        results = join_rows([row for part in parts for row in self._rows_of(case, part, case.segments)])
        self._count_non_finite(results, f"the shape case {case.name}")
        if self._write:
            np.save(self.folder / case_file(case.name), results)

    def plain_rows(self, cases: tuple[Case, ...]) -> None:
        """Compute each row of the cases, and of the native one, alone; write the results for the comparison with their batch."""
        for case in (*cases, self._native):
            file = self.folder / plain_file(case.plain)
            if not self._write or not case.plain or file.is_file() or case.name in self.skipped:
                continue
            alone = [self._batch(case, (row,)) for row in case.rows]
            rows = [row for batch in alone for row in self._rows_of(case, batch, (sum(case.segments),))]
            np.save(file, join_rows(rows))

    def continuations(self, spec: RunSpec) -> tuple[tuple[int, ...], ...]:
        """Continue prompts greedily; prompt ``n`` belongs to window ``n``."""
        return continue_greedily(
            self._model,
            self._samples,
            spec.prompts,
            spec.new_tokens,
            drafts=spec.drafts,
            check=self._count_non_finite,
        )

    def long_continuations(self, spec: LongSpec) -> LongResult:
        """Continue prompts at length, and write the logits of the reference's continuations."""
        sources = [source_of(self._samples, [index]) for index in range(len(spec.prompts))]
        return continue_long(self._model, spec, sources, self.folder, on_logits=self._count_non_finite)

    def _rows_of(self, case: Case, batch: Batch, segments: tuple[int, ...]) -> list[Logits]:
        """Return the compared results of each row, (P, V): those without padding, or the text's vector."""
        if case.embedding:
            return list(self._model.embed(batch.step()))
        parts = [part for _, part in run_segments(self._model, batch.ids, batch.mask, segments, source=batch.source)]
        return self._read(np.concatenate(parts, axis=1), batch.mask)

    def _batch_windows(self, windows: list[int]) -> Batch:
        ids = self._samples.tokens[windows]
        return Batch(ids, np.ones_like(ids), source_of(self._samples, windows))

    def _batch(self, case: Case, rows: tuple[CaseRow, ...]) -> Batch:
        """Return rows of a case as one batch."""
        samples, windows = self._samples, [row.window for row in rows]
        token = self._padding_token
        if samples.source is None:
            cut = [self._cut(samples.tokens[row.window], row.length) for row in rows]
            return Batch(*padded(cut, side=case.padding, token=token))
        ids = samples.tokens[windows, : sum(case.segments)]
        if samples.source.dtype.kind == "f":  # sound is not cut: models normalize the whole of it
            return Batch(ids, np.ones_like(ids), source_of(samples, windows))
        sources = [self._cut(samples.source[row.window], row.length) for row in rows]
        return Batch(ids, np.ones_like(ids), Source(*padded(sources, side=case.padding, token=token)))

    def _cut(self, window: Ints, length: int) -> Ints:
        """Cut the beginning of a window; except for a decoder, keep the last token, which ends the text."""
        if self._family == DECODER:
            return window[:length]
        return np.concatenate([window[: length - 1], window[-1:]])

    def _find_skip_reason(self, case: Case) -> str:
        bounds, model = self._model.bounds, self._model
        if case.embedding and not model.embeds:
            if model.embeds is None:
                return "its runtime gives no sentence embedding"
            raise Unusable("it gives no sentence_embedding, which the base model's modules.json asks for")
        if len(case.segments) > 1 and not model.has_cache:
            return "the model has no KV cache"
        if max(case.segments) > bounds.sequence or sum(case.segments[:-1]) > bounds.past:
            return f"the engine accepts at most {bounds.sequence} tokens per call after {bounds.past} cached ones"
        return ""

    def _count_non_finite(self, results: Logits, where: str) -> None:
        wrong = results.size - int(np.isfinite(results).sum())
        if wrong and not self.non_finite:
            self.first_non_finite = where
        self.non_finite += wrong


def choose_row_selector(family: Family) -> RowSelector:
    """Choose the selector of results for a family."""
    if family == SEQUENCE_CLASSIFIER:
        return _select_rows
    return _select_spans if family.comparison is Comparison.SPANS else _select_tokens


def per_token(family: Family) -> bool:
    """Return whether each token has a result."""
    return choose_row_selector(family) is _select_tokens


def join_rows(rows: list[Logits]) -> Logits:
    """Stack the results of all rows, with narrower ones filled up: (positions, V)."""
    width = max(row.shape[-1] for row in rows)
    filled = [np.pad(row, ((0, 0), (0, width - row.shape[-1])), constant_values=NOWHERE) for row in rows]
    results: Logits = np.concatenate(filled)
    return results


def _select_tokens(results: Logits, mask: Ints) -> list[Logits]:
    """Select the results of tokens. results: (B, L, V)."""
    return [row[real.astype(bool)] for row, real in zip(results, mask, strict=True)]


def _select_rows(results: Logits, mask: Ints) -> list[Logits]:  # noqa: ARG001 - a result is its whole row's
    """Select all results of each row. results: (B, P, V)."""
    return list(results)


def _select_spans(results: Logits, mask: Ints) -> list[Logits]:
    """Select the starts and ends of spans at tokens. results: (B, 2, L)."""
    return [row[:, real.astype(bool)] for row, real in zip(results, mask, strict=True)]

"""Runs one model over everything it is judged by; the same code for every runtime and family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from slipway.models.families import DECODER
from slipway_validate.cases import family_named
from slipway_validate.numerics import Ints, Logits
from slipway_validate.protocol.messages import Case, CaseRow, RunSpec, case_file, plain_file
from slipway_validate.runner.model import LanguageModel, Source, padded, plain_step, run_segments, segments_within
from slipway_validate.runner.readings import joined, per_token, reading_of
from slipway_validate.samples import Samples

Report = Callable[[str, int, int], None]
"""Called with phase, done, total."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows computed together. ids, mask: (B, L)."""

    ids: Ints
    mask: Ints
    source: Source | None = None

    def part(self, start: int, count: int) -> Batch:
        """Some of the rows, padded as they are together."""
        rows, source = slice(start, start + count), self.source
        if source is not None:
            source = Source(source.values[rows], None if source.mask is None else source.mask[rows])
        return Batch(self.ids[rows], self.mask[rows], source)


class Collector:
    """Computes results and continuations of one model and writes them into a folder.

    Attributes:
        non_finite: Values seen so far that are NaN or infinite, padding left out.
        first_non_finite: Where the first of them was, in words.
        skipped: Cases that do not apply to the model, with why.
        vocabulary: Values of a window's result, 0 until one was computed.
    """

    def __init__(self, model: LanguageModel, spec: RunSpec, samples: Samples, folder: Path, *, report: Report) -> None:
        self._model = model
        self._family = family_named(spec.family)
        self._samples = samples
        self._padding_token = spec.padding_token
        self._read = reading_of(self._family)
        self._folder = folder
        self._write = spec.write_logits
        self._report = report
        self.non_finite = 0
        self.first_non_finite = ""
        self.skipped: dict[str, str] = {}
        self.vocabulary = 0

    def windows(self, *, file: str, batch_values: int) -> None:
        """Results of every window, each in one plain pass."""
        tokens, positions = self._samples.tokens, self._samples.positions
        count, length = tokens.shape
        output: np.memmap[tuple[int, int, int], np.dtype[np.float32]] | None = None
        start = 0
        while start < count:
            # How wide results are, and with it the largest batch, is known after the first window.
            fitting = batch_values // (length * self.vocabulary) if self.vocabulary else 1
            rows = list(range(start, min(count, start + max(1, min(fitting, self._model.bounds.batch)))))
            batch = self._whole(rows)
            segments = segments_within(length, self._model.bounds)
            for columns, results in run_segments(self._model, batch.ids, batch.mask, segments, source=batch.source):
                self._look_at(results, f"windows {start} to {rows[-1]}")
                self.vocabulary = results.shape[-1]
                found = results if positions is None else results[np.arange(len(rows))[:, None], positions[rows]]
                if self._write:
                    every = per_token(self._family) and positions is None
                    if output is None:
                        shape = (count, length if every else found.shape[1], found.shape[2])
                        output = open_memmap(self._folder / file, mode="w+", dtype=np.float32, shape=shape)
                    output[start : rows[-1] + 1, columns if every else slice(None)] = found
            start = rows[-1] + 1
            self._report("windows", start, count)
        if output is not None:
            output.flush()

    def case(self, case: Case) -> None:
        """Results of one shape case, at its real positions only.

        A runtime that takes a smaller batch gets the rows a few at a time, padded as they are together.
        """
        reason = self._why_not(case)
        if reason:
            self.skipped[case.name] = reason
            return
        batch, step = self._batch(case, case.rows), self._model.bounds.batch
        parts = [batch.part(start, step) for start in range(0, len(batch.ids), step)]
        results = joined([row for part in parts for row in self._real_rows(part, case.segments)])
        self._look_at(results, f"the shape case {case.name}")
        if self._write:
            np.save(self._folder / case_file(case.name), results)

    def plain_rows(self, case: Case) -> None:
        """Results of a case's rows, each alone: what a batch of them is compared with."""
        file = self._folder / plain_file(case.plain)
        if not self._write or not case.plain or file.is_file() or case.name in self.skipped:
            return
        alone = [self._batch(case, (row,)) for row in case.rows]
        np.save(file, joined([row for batch in alone for row in self._real_rows(batch, (sum(case.segments),))]))

    def continuation(self, index: int, prompt: tuple[int, ...], new_tokens: int) -> tuple[int, ...]:
        """Greedy continuation of a prompt of window ``index``, through the KV cache where the model has one."""
        tokens, source = list(prompt), source_of(self._samples, [index])
        fresh, past = list(prompt), None
        while len(tokens) < len(prompt) + new_tokens:
            step = plain_step(fresh, past=past, past_length=len(tokens) - len(fresh), source=source)
            logits, cache = self._model.forward(step)
            self._look_at(logits, f"greedy continuation, token {len(tokens)}")
            tokens.append(int(logits[0, -1].argmax()))
            fresh, past = (tokens[-1:], cache) if self._model.has_cache else (tokens, None)
        return tuple(tokens[len(prompt) :])

    def _real_rows(self, batch: Batch, segments: tuple[int, ...]) -> list[Logits]:
        """Results of each row where there is no padding, (P, V)."""
        parts = [found for _, found in run_segments(self._model, batch.ids, batch.mask, segments, source=batch.source)]
        return self._read(np.concatenate(parts, axis=1), batch.mask)

    def _whole(self, windows: list[int]) -> Batch:
        ids = self._samples.tokens[windows]
        return Batch(ids, np.ones_like(ids), source_of(self._samples, windows))

    def _batch(self, case: Case, rows: tuple[CaseRow, ...]) -> Batch:
        """Rows of a case as one batch."""
        samples, windows = self._samples, [row.window for row in rows]
        token = self._padding_token
        if samples.source is None:
            cut = [self._cut(samples.tokens[row.window], row.length) for row in rows]
            return Batch(*padded(cut, side=case.padding, token=token))
        ids = samples.tokens[windows, : sum(case.segments)]
        if samples.source.ndim > 2:
            return Batch(ids, np.ones_like(ids), source_of(samples, windows))
        sources = [self._cut(samples.source[row.window], row.length) for row in rows]
        return Batch(ids, np.ones_like(ids), Source(*padded(sources, side=case.padding, token=token)))

    def _cut(self, window: Ints, length: int) -> Ints:
        """The beginning of a window; it ends as the window does where a model looks for the end of a text."""
        if self._family == DECODER:
            return window[:length]
        return np.concatenate([window[: length - 1], window[-1:]])

    def _why_not(self, case: Case) -> str:
        bounds, model = self._model.bounds, self._model
        if len(case.segments) > 1 and not model.has_cache:
            return "the model has no KV cache"
        if max(case.segments) > bounds.sequence or sum(case.segments[:-1]) > bounds.past:
            return f"the engine takes at most {bounds.sequence} tokens per call behind {bounds.past} cached ones"
        return ""

    def _look_at(self, results: Logits, where: str) -> None:
        wrong = results.size - int(np.isfinite(results).sum())
        if wrong and not self.non_finite:
            self.first_non_finite = where
        self.non_finite += wrong


def source_of(samples: Samples, windows: list[int]) -> Source | None:
    """What the encoder reads of these windows, without padding; None without an encoder of its own."""
    if samples.source is None:
        return None
    values = samples.source[windows]
    return Source(values, np.ones_like(values) if values.ndim == 2 else None)

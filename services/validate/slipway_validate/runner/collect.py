"""Runs one model over everything it is judged by; the same code for every runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from slipway_validate.numerics import Ints, Logits
from slipway_validate.protocol.messages import Case, case_file
from slipway_validate.runner.model import LanguageModel, left_padded, plain_step, run_segments, segments_within

Report = Callable[[str, int, int], None]
"""Called with phase, done, total."""


class Collector:
    """Computes logits and continuations of one model and writes them into a folder.

    Attributes:
        non_finite: Logits seen so far that are NaN or infinite, padding left out.
        first_non_finite: Where the first of them was, in words.
        skipped: Cases that do not apply to the model, with why.
        vocabulary: Size of the logits' last axis, 0 until something was computed.
    """

    def __init__(self, model: LanguageModel, folder: Path, *, write: bool, report: Report) -> None:
        self._model = model
        self._folder = folder
        self._write = write
        self._report = report
        self.non_finite = 0
        self.first_non_finite = ""
        self.skipped: dict[str, str] = {}
        self.vocabulary = 0

    def windows(self, tokens: Ints, *, file: str, batch_values: int) -> None:
        """Logits of every window, each in one plain pass. tokens: (N, T)."""
        count, length = tokens.shape
        output: np.memmap[tuple[int, int, int], np.dtype[np.float32]] | None = None
        start = 0
        while start < count:
            # The vocabulary, and with it the largest batch, is known after the first window.
            fitting = batch_values // (length * self.vocabulary) if self.vocabulary else 1
            batch = tokens[start : start + max(1, min(fitting, self._model.bounds.batch))]
            segments = segments_within(length, self._model.bounds)
            for columns, logits in run_segments(self._model, batch, np.ones_like(batch), segments):
                self._look_at(logits, f"windows {start} to {start + len(batch) - 1}")
                if self._write:
                    if output is None:
                        shape = (count, length, self.vocabulary)
                        output = open_memmap(self._folder / file, mode="w+", dtype=np.float32, shape=shape)
                    output[start : start + len(batch), columns] = logits
            start += len(batch)
            self._report("windows", start, count)
        if output is not None:
            output.flush()

    def case(self, case: Case, tokens: Ints) -> None:
        """Logits of one shape case, at its real positions only.

        A runtime that takes a smaller batch gets the rows a few at a time, padded as they are together.
        """
        reason = self._why_not(case)
        if reason:
            self.skipped[case.name] = reason
            return
        ids, mask = left_padded([tokens[row.window, : row.length] for row in case.rows])
        step = self._model.bounds.batch
        batches = [(ids[start : start + step], mask[start : start + step]) for start in range(0, len(ids), step)]
        rows = np.concatenate([self._real_rows(case, *batch) for batch in batches])
        self._look_at(rows, f"the shape case {case.name}")
        if self._write:
            np.save(self._folder / case_file(case.name), rows)

    def _real_rows(self, case: Case, ids: Ints, mask: Ints) -> Logits:
        """Logits where there is no padding. ids, mask: (B, L) -> (tokens, V)."""
        parts = [logits for _, logits in run_segments(self._model, ids, mask, case.segments)]
        rows: Logits = np.concatenate(parts, axis=1)[mask.astype(bool)]
        return rows

    def continuation(self, prompt: tuple[int, ...], new_tokens: int) -> tuple[int, ...]:
        """Greedy continuation of a prompt, through the KV cache where the model has one."""
        tokens = list(prompt)
        fresh, past = list(prompt), None
        while len(tokens) < len(prompt) + new_tokens:
            logits, cache = self._model.forward(plain_step(fresh, past=past, past_length=len(tokens) - len(fresh)))
            self._look_at(logits, f"greedy continuation, token {len(tokens)}")
            tokens.append(int(logits[0, -1].argmax()))
            fresh, past = (tokens[-1:], cache) if self._model.has_cache else (tokens, None)
        return tuple(tokens[len(prompt) :])

    def _why_not(self, case: Case) -> str:
        bounds, model = self._model.bounds, self._model
        if len(case.segments) > 1 and not model.has_cache:
            return "the model has no KV cache"
        if max(case.segments) > bounds.sequence or sum(case.segments[:-1]) > bounds.past:
            return f"the engine takes at most {bounds.sequence} tokens per call behind {bounds.past} cached ones"
        return ""

    def _look_at(self, logits: Logits, where: str) -> None:
        self.vocabulary = logits.shape[-1]
        wrong = logits.size - int(np.isfinite(logits).sum())
        if wrong and not self.non_finite:
            self.first_non_finite = where
        self.non_finite += wrong

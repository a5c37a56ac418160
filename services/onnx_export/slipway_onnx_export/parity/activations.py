"""Compare a graph's activations with those that hooks record in transformers, in the conversations of the parity check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipway.errors import ONNXExportError
from slipway.proof.comparison import difference
from slipway_onnx_export.forms.activations import WantedActivations, places_of, record_activations
from slipway_onnx_export.parity.rows import Array, Conversation, Session

_MOST_TOKENS = 64
"""Most tokens of a call that are compared, from its first: attention weights grow with the square of the tokens."""


@dataclass
class Watch:
    """The largest differences of activations over all conversations.

    Attributes:
        wanted: The activations.
        diffs: Largest difference by name.
        scales: Largest absolute reference value by name, at least 1.
    """

    wanted: WantedActivations
    diffs: dict[str, float] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)

    def wrap(self, conversation: Conversation) -> Conversation:
        """Return a conversation that compares the activations too, if there are any."""
        return _WatchedConversation(conversation, self) if self.wanted else conversation

    def judge(self, tolerance: float) -> float | None:
        """Return the largest relative difference; None if nothing is watched.

        Raises:
            ONNXExportError: ``EXPORT_PARITY_FAILED``: it is above the tolerance, or an activation was never compared.
        """
        if not self.wanted:
            return None
        names = [each.name for each in self.wanted]
        relative = {name: self.diffs.get(name, float("inf")) / self.scales.get(name, 1.0) for name in names}
        worst = max(names, key=lambda name: relative[name])
        if relative[worst] > tolerance:
            raise ONNXExportError(
                f"the activations {worst} differ from PyTorch's by {relative[worst]:.3g} of their largest value, "
                f"and {tolerance:.3g} is allowed",
                reason="EXPORT_PARITY_FAILED",
                remedy="use another engine",
                about={"output": worst, "max_abs_diff": self.diffs.get(worst), "allowed": tolerance},
            )
        return relative[worst]

    def compare(self, name: str, found: Array | None, reference: Array, mask: Array) -> None:
        """Note the difference at tokens that are not padding. mask: (batch, new)."""
        diff = float("inf")
        if found is not None and found.ndim == 4:
            # transformers drops what is before the sliding window from its cache; a graph returns the zeros of its mask.
            unseen = max(found.shape[-1] - reference.shape[-1], 0)
            reference = np.pad(reference, [(0, 0)] * 3 + [(unseen, 0)])
        if found is not None and found.shape == reference.shape:
            diff = difference(_drop_padding(found, mask), _drop_padding(reference, mask)).largest
        self.diffs[name] = max(self.diffs.get(name, 0.0), diff)
        self.scales[name] = max(
            self.scales.get(name, 1.0), float(np.abs(_drop_padding(reference, mask)).max(initial=0.0))
        )


@dataclass
class _WatchedConversation:
    """A conversation with activations; see :class:`slipway_onnx_export.parity.rows.Conversation`."""

    inner: Conversation
    watch: Watch
    expected: list[dict[str, Array]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def calls(self) -> int:
        return self.inner.calls

    def prepare(self, model: Any) -> None:
        self.inner.prepare(model)

    def run_reference(self, model: Any) -> Iterator[Array]:
        with record_activations(places_of(model, self.watch.wanted)) as records:
            for result in self.inner.run_reference(model):
                self.expected.append({name: _cut(values[0].numpy()) for name, values in records.items()})
                records.clear()
                yield result

    def run_exported(self, sessions: Mapping[str, Session]) -> Iterator[Array]:
        last = _Call()
        watched = {name: _ObservedSession(session, last) for name, session in sessions.items()}
        for index, result in enumerate(self.inner.run_exported(watched)):
            for name, reference in self.expected[index].items():
                value = last.found.get(name)
                rows, new = last.mask.shape
                whole = _cut(reference.reshape(rows, new, -1)) if reference.ndim == 2 else reference
                self.watch.compare(name, None if value is None else _cut(value), whole, last.mask[:, :_MOST_TOKENS])
            yield result


@dataclass
class _Call:
    """The results of a graph's last call, and which of its tokens are not padding, (batch, new)."""

    found: Mapping[str, Array] = field(default_factory=dict)
    mask: Array = field(default_factory=lambda: np.ones((0, 0), bool))


class _ObservedSession:
    """A session that records its last call."""

    def __init__(self, session: Session, last: _Call) -> None:
        self._session, self._last = session, last

    def run(self, feed: dict[str, Array]) -> dict[str, Array]:
        self._last.found = results = self._session.run(feed)
        tokens = feed["input_ids"] if "input_ids" in feed else results["last_hidden_state"]
        rows, new = tokens.shape[:2]
        mask = feed.get("attention_mask")
        self._last.mask = np.ones((rows, new), bool) if mask is None else mask[:, -new:].astype(bool)
        return dict(results)

    def empty_past(self, *, batch: int) -> dict[str, Array]:
        return self._session.empty_past(batch=batch)


def _cut(value: Array) -> Array:
    """Cut a value to its first tokens; a value with one list of all rows' tokens stays whole."""
    return value if value.ndim == 2 or value.shape[-2] <= _MOST_TOKENS else value[..., :_MOST_TOKENS, :].copy()


def _drop_padding(value: Array, mask: Array) -> Array:
    """Drop the rows of padding tokens; attention weights have one for each query in each head."""
    by_token = value.transpose(0, 2, 1, 3) if value.ndim == 4 else value
    kept: Array = by_token[mask]
    return kept

"""The shapes in which the same tokens are computed once more.

Every row of a case is a prefix of a window, so its logits have to equal those of one plain pass over that window, the
reference's and the output's own. What these shapes catch: an attention mask or position ids that the graph ignores, a
graph specialised to the batch, sequence or past it was traced with, a KV cache that is written or read wrongly.
"""

from __future__ import annotations

from slipway_validate.protocol.messages import Case, CaseRow

LENGTH = 32
"""Longest row of a case; enough for an off-by-one to show, short enough to cost nothing."""
DECODE_STEPS = 6


def shape_cases(windows: int, length: int) -> tuple[Case, ...]:
    """The cases for ``windows`` windows of ``length`` tokens (at least 8)."""
    full = min(LENGTH, length)
    steps = min(DECODE_STEPS, full // 4)
    chunk = max(2, full // 8)
    padded = tuple(
        CaseRow(window=index % windows, length=row) for index, row in enumerate((full, steps + 2, full // 2 + 1))
    )
    one = (CaseRow(window=0, length=full),)
    return (
        Case(name="left_padded", rows=padded, segments=(full,)),
        Case(name="single_token", rows=(CaseRow(window=0, length=1),), segments=(1,)),
        Case(name="decode", rows=one, segments=(full - steps, *(1,) * steps)),
        Case(name="decode_left_padded", rows=padded, segments=(full - steps, *(1,) * steps)),
        Case(name="chunked", rows=one, segments=(full - 2 * chunk, chunk, chunk)),
    )


def native_case(windows: int, length: int) -> Case:
    """One padded batch as the model is served: in its own data type, not in float32."""
    padded = next(case for case in shape_cases(windows, length) if case.name == "left_padded")
    return padded.model_copy(update={"name": "native_dtype"})

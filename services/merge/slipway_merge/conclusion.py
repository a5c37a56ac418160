"""Judge what a merge wrote, and record it: the same for a whole merge and for one that is joined from parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slipway.errors import ModelMergeError
from slipway.stage import Context
from slipway_merge.writing.output_file import Written
from slipway_merge.writing.writer import relative_changes


@dataclass
class Results:
    """What is known of written files.

    Attributes:
        written: Statistics of their content.
        verified: Figures of the checks.
        resumed: Number of files that an earlier attempt had written.
    """

    written: Written
    verified: dict[str, Any]
    resumed: int = 0

    @classmethod
    def joined(cls, parts: Iterable[Results]) -> Results:
        """Return the results of all parts as those of the whole."""
        whole, verified, resumed = Written(), {"tensors": 0, "modules_computed": 0}, 0
        largest = 0.0
        for part in parts:
            whole.add(part.written)
            resumed += part.resumed
            largest = max(largest, part.verified["largest_error_of_tolerance"])
            for name in verified:
                verified[name] += part.verified[name]
        whole.changes.sort(key=lambda change: change.tensor)
        return cls(whole, {**verified, "largest_error_of_tolerance": largest}, resumed)


def conclude(
    results: Results, facts: Mapping[str, Any], *, replaced: bool, warnings: Iterable[str], ctx: Context
) -> None:
    """Give the warnings, judge the results and record the facts.

    Args:
        results: What is known of all written files.
        facts: Facts that were known before.
        replaced: Whether the adapter brings values that differ from the base's.
        warnings: Warnings for the user.
        ctx: The stage's context.

    Raises:
        ModelMergeError: ``ADAPTER_NO_EFFECT``.
    """
    for warning in warnings:
        ctx.warn(warning)
    _judge(results.written, replaced, ctx)
    changes = results.written.changes
    total = sum(change.total for change in changes)
    ctx.record(
        **facts,
        tensors_merged=len(changes),
        tensors_copied=results.written.copied,
        tensors_converted=results.written.converted,
        scalings=sorted({change.scaling for change in changes if change.scaling is not None}),
        ranks=sorted({change.rank for change in changes if change.rank is not None}),
        unchanged_share=round(sum(c.total - c.changed for c in changes) / total, 6) if total else None,
        modules=relative_changes(changes),
        verified=results.verified,
        shards_resumed=results.resumed,
    )


def _judge(written: Written, replaced: bool, ctx: Context) -> None:
    """Refuse a result that equals the base; warn of modules whose change was lost in rounding."""
    lost = sorted(change.module for change in written.changes if change.changed == 0)
    if written.changes and len(lost) == len(written.changes) and not replaced:
        raise ModelMergeError(
            f"the merged model equals the base: all {len(lost)} updates vanish in the rounding of the output's data type "
            f"(largest relative change {max(change.relative_change for change in written.changes):.2g})",
            reason="ADAPTER_NO_EFFECT",
            remedy="merge with dtype float32, or use a later checkpoint",
            about={"module": lost[0]},
        )
    if lost:
        shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        ctx.warn(f"{len(lost)} of {len(written.changes)} merged modules are unchanged after rounding: {shown}")

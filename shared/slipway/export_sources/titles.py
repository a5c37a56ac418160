"""The title of an export for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipway.texts import one_line


def title(labels: Mapping[str, str], *, more: Sequence[str] = ()) -> str:
    """Return a title such as ``checkpoint-40 of h_half onto qwen3-base``; empty for an export that does not name its sources.

    Args:
        labels: Labels of the export: ``checkpoint``, ``model_name`` and ``base_model``.
        more: Names of the adapters combined with the checkpoint's.
    """
    checkpoint, run, base = (one_line(labels.get(name, "")) for name in ("checkpoint", "model_name", "base_model"))
    what = f"{checkpoint} of {run}" if checkpoint and run and checkpoint != run else checkpoint or run
    if not what:
        return ""
    joined = f" with {', '.join(more)}" if more else ""
    return f"{what}{joined} onto {base}" if base else f"{what}{joined}"

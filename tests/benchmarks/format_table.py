"""Write the figures of ``bench_formats.py`` as one table: a row for each output and peer, ours / the peer's and the ratio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

COLUMNS = {
    "seconds": ("seconds", "{:.1f}"),
    "core_seconds": ("core seconds", "{:.1f}"),
    "peak_anonymous_mb": ("peak MB", "{:.0f}"),
    "file_mb": ("file MB", "{:.1f}"),
    "prefill_seconds": ("prompt, s", "{:.3f}"),
    "decode_tokens_per_second": ("tokens/s", "{:.0f}"),
}
"""Heading and form of each figure."""


def table(found: Mapping[str, float]) -> str:
    """Return the Markdown table of figures named ``<output>_<who>_<figure>`` and ``<output>_<figure>_ratio_to_<peer>``."""
    head = ["output", "peer", *(heading for heading, _ in COLUMNS.values())]
    rows = [head, ["---"] * len(head), *_rows(found)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _rows(found: Mapping[str, float]) -> Iterator[list[str]]:
    begin = "_core_seconds_ratio_to_"
    compared = [name.partition(begin) for name in found if begin in name]
    for output, _, peer in compared:
        yield [f"`{output}`", peer, *(_cell(found, output, peer, figure) for figure in COLUMNS)]
    for name in found:
        output, split, _ = name.partition("_slipway_core_seconds")
        if split and output not in {each for each, _, _ in compared}:
            yield [f"`{output}`", "–", *(_cell(found, output, "", figure) for figure in COLUMNS)]


def _cell(found: Mapping[str, float], output: str, peer: str, figure: str) -> str:
    _, form = COLUMNS[figure]
    said = [form.format(found[name]) for who in ("slipway", peer) if (name := f"{output}_{who}_{figure}") in found]
    ratio = found.get(f"{output}_{figure}_ratio_to_{peer}")
    return " / ".join(said) + (f" = {ratio:.2f}" if ratio is not None else "")

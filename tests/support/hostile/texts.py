"""A grammar of values that break programs, as YAML, text and values; and the bounds that every reader must keep."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

from slipway.errors import ModelExportError
from slipway.reasons import REASONS

UNFORESEEN = {"INTERNAL", "STAGE_ERROR"}
# Of processor time: 0.4 at most on an idle machine, more than twice that beside ten other processes.
SECONDS, BYTES = 2.0, 100_000_000

DECEPTIVE = (
    "\x1b[2J\x1b]0;owned\x07", "\x9b31m", "a\rb", "a\nprojects/x succeeded", "\x7f", "pay\u202eslap", "\u2066a\u2069", "\u200fa\u200e",
    "pay\u200bpal", "pay\u200dpal", "a\u2028b", "\ufeffa", "a\u00adb", "\u3164", "\U000e0041", "\ud83d", "\udcff",
)  # fmt: skip
"""Texts that are not shown unchanged."""

SCALARS = (
    "2001-99-99", "2001-02-30 25:61:61", "0x_", "0b_", "0o9", "!!int abc", "!!float abc", "!!bool maybe", "!!timestamp soon",
    "!!binary é", "!!null x", "!!python/object/apply:os.system [ls]", "!!set {a, b}", "!!omap [1]", "!unknown x", "1:60:60:60",
    "9" * 5000, "-" + "9" * 5000, "9" * 30, str(2**63), str(2**64), str(-(2**63) - 1), "1e400", "-1e400", ".inf", "-.inf", ".nan",
    "0." + "1" * 3000, "1:1" + ":1" * 3000, "~", "~nosuchuser/a", "~nosuchuser", "null", "''", '""', '"\\ud800"', '"\\u202e"',
    '"\\0"', '"\\e[31m"', "²", "٣", "on", "0777", "1_000", "=", "<<", "&a x", "*a", "[]", "{}", "[[[[]]]]", "? x", "- x", "%x",
    "'" + "x" * 5000 + "'", "'" + "../" * 2000 + "'", "'{'", "'{model_name!r}'", "'{model_name:>999999999}'", "'{0}'",
)  # fmt: skip
"""YAML of one value each, good and bad."""

TEXTS = (
    *DECEPTIVE, *(scalar for scalar in SCALARS if not scalar.startswith(("!", '"', "'"))), "\0", "x" * 100_000, "1" * 100_000, ",", "=",
    "a=b=c", "int4.mean_kl=1e400", "merge=" + "9" * 5000, "merge=²", "9" * 400 + "GiB", "1e400GiB", "[1,2,3]", "1,2", "[" * 5000,
    ",".join(["1"] * 20_000), "sm٣٣", "%s%n{0}", "${HOME}", "${jndi:ldap://x}", "é" * 3000,
)  # fmt: skip
"""Texts of variables, flags and requests."""


@st.composite
def yaml_documents(draw: st.DrawFn, keys: tuple[str, ...]) -> str:
    """Draw a configuration file in which some settings have a hostile value, or that is hostile as a whole."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from(whole_documents()))
    if kind == 1:
        return draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
    lines: list[str] = []
    for key in draw(st.lists(st.sampled_from(keys), min_size=1, max_size=4, unique=True)):
        value = draw(st.one_of(st.sampled_from(SCALARS), _nested()))
        parts = key.split(".")
        lines += [f"{'  ' * (depth + 1)}{part}:" for depth, part in enumerate(parts[:-1])]
        lines.append(f"{'  ' * len(parts)}{parts[-1]}: {value}")
    return "export:\n" + "\n".join(lines) + "\n"


def whole_documents() -> list[str]:
    """Return documents that expand to far more than their size."""
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    merged = ["a0: &a0 {" + ", ".join(f"k{n}: x" for n in range(50)) + "}"]
    merged += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 20)}]}}" for n in range(1, 8)]
    chain = ["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 1500))]
    return [
        "\n".join(["export:", "  combination:", "    adapters: *a11"]),
        "\n".join([*levels, "export: {combination: {adapters: *a11}}"]),
        "\n".join([*levels, "export: {combination: {adapters: *a4}}"]),
        "\n".join([*merged, "export: *a7"]),
        "\n".join([*chain, "export: {combination: {adapters: *a1499}}"]),
        "export: &e {checkpoint: *e}",
        "export: {<<: 3}",
        "export: {<<: [1, {a: b}]}",
        "export:\n" + "\n".join(f"  unknown{n}: {n}" for n in range(4000)),
        "export:\n" + "\n".join(f"  chekpoint{n}: {{path: x}}" for n in range(2000)),
        "\n".join(f"top{n}: {n}" for n in range(2400)),
        "export: {combination: {adapters: [" + "1, " * 2000 + "]}}",
        "export: {combination: {adapters: &x ['" + "x" * 60_000 + "'], weights: [" + "*x, " * 1500 + "]}}",
        "export: " + "[" * 50_000,
        "export: " + "{a: " * 20_000,
        "export:\n" + "\n".join("  " * n + "a:" for n in range(1, 300)),
        "- " * 20_000,
        "? " * 20_000,
        "export: {? [a, b] : c, ? {d: e} : f}",
        "export: '" + "x" * 2_000_000 + "'",
        "#" * 2_000_000,
        "\0\0\0",
        "%YAML 9.9\n---\nexport: {}",
        "export: {}\n---\nexport: {}",
    ]


def _nested() -> st.SearchStrategy[str]:
    lists = st.lists(st.sampled_from(SCALARS), max_size=4).map(lambda found: f"[{', '.join(found)}]")
    tables = st.lists(
        st.tuples(st.sampled_from(["merge", "int4", "mean_kl", "x", "<<", "²"]), st.sampled_from(SCALARS)), max_size=3
    )
    return st.one_of(lists, tables.map(lambda rows: "{" + ", ".join(f"{name}: {value}" for name, value in rows) + "}"))


@contextmanager
def within_bounds(*, allowed: set[str] | None = None) -> Iterator[None]:
    """Check that the block gives a value, or an error with a reason of the table, in bounded time and memory.

    Args:
        allowed: The allowed reasons; by default all that are foreseen.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, began = _resident_bytes("VmRSS"), time.process_time()
    try:
        yield
    except ModelExportError as error:
        assert error.reason in REASONS
        assert error.reason not in UNFORESEEN
        assert allowed is None or error.reason in allowed, f"{error.reason}: {error.message[:500]}"
        assert len(str(error)) <= 50_000
    took, taken = time.process_time() - began, _resident_bytes("VmHWM") - before
    assert took < SECONDS, f"{took:.1f} s"
    assert taken < BYTES, f"{taken / 1e6:.0f} MB"


def _resident_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024

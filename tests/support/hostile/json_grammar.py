"""A grammar of hostile JSON, as text: invalid JSON, and valid JSON that no reasonable program writes.

Every parser of a foreign file gets these texts and must end as :func:`answer` says.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st

from slipway.errors import ModelExportError
from slipway.reasons import REASONS
from support.harness.unhurried import unhurried

_T = TypeVar("_T")
_STATUS = Path("/proc/self/status")

NUMBERS = st.sampled_from(
    ["0", "-0", "-1", "1.5", "true", "1e400", "-1e400", "1e-400", "NaN", "Infinity", "-Infinity", "1E+99999", "1000000000", "9" * 30,
     str(2**31), str(2**63 - 1), str(2**63), str(-(2**63) - 1), str(2**64), "9" * 309, "9" * 4000, "9" * 5000, "-" + "9" * 5000,
     "0." + "3" * 5000]
)  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(
        ["", "\\ud800", "\\udc80x", "\\ud83d\\ude00", "\\u0000", "\\u001b[2J", "\\u202e", "..", "../../etc/passwd", "/dev/zero", "a\\u0000b",
         "a{99999999999999}", "(" * 300, "x" * 3000, "~nosuchuser", "~a\\u0000b", "~\\ud800/x", "2001-99-99", "²", "%s{0}"]
    ),
    st.text(max_size=20).map(lambda text: json.dumps(text)[1:-1]),
).map(lambda text: f'"{text}"')  # fmt: skip
_WHOLES: Mapping[str, Callable[[], str]] = {
    "nothing": lambda: "",
    "null": lambda: "null",
    "list": lambda: "[]",
    "object": lambda: "{}",
    "unclosed lists": lambda: "[" * 100_000,
    "lists in lists": lambda: "[" * 100_000 + "]" * 100_000,
    "objects in objects": lambda: '{"a":' * 2000 + "1" + "}" * 2000,
    "lists at the limit": lambda: "[" * 64 + "]" * 64,
    "many lists": lambda: "[" + "[]," * 100_000 + "[]]",
    "very many lists": lambda: "[" + "[]," * 1_000_000 + "[]]",
    "many objects": lambda: "[" + "{}," * 100_000 + "{}]",
    "names twice": lambda: "{" + ",".join(f'"k{number % 9999}":0' for number in range(10_000)) + "}",
    "byte order mark": lambda: "\ufeff{}",
    "trailing comma": lambda: '{"a": 1,}',
    "single quotes": lambda: "{'a': 1}",
    "no colon": lambda: '{"a" 1}',
    "cut word": lambda: "nul",
    "quote": lambda: '"',
    "zero": lambda: "\0",
    "long text with one wide character": lambda: '"' + "x" * 3_000_000 + '\U0001f600"',
}
#: By name, because Hypothesis writes examples out.
WHOLES = st.sampled_from(sorted(_WHOLES)).map(lambda name: _WHOLES[name]())
VALUES = st.recursive(
    st.one_of(NUMBERS, TEXTS, st.sampled_from(["null", "true", "false", "[]", "{}", "[[]]"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda parts: f"[{','.join(parts)}]"),
        st.lists(st.tuples(TEXTS, inner), max_size=4).map(
            lambda pairs: "{" + ",".join(f"{key}:{value}" for key, value in pairs) + "}"
        ),
    ),
    max_leaves=6,
)


@st.composite
def objects(draw: st.DrawFn, good: Mapping[str, Any]) -> str:
    """Draw a valid object with one to three fields replaced, repeated or added."""
    fields = [(json.dumps(name), json.dumps(value)) for name, value in good.items()]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(fields)))
        name = draw(st.one_of(st.sampled_from([json.dumps(name) for name in good]), TEXTS))
        if place < len(fields) and draw(st.booleans()):
            fields[place] = (fields[place][0], draw(VALUES))
        else:
            fields.insert(place, (name, draw(VALUES)))
    return "{" + ",".join(f"{name}:{value}" for name, value in fields) + "}"


def documents(good: Mapping[str, Any]) -> st.SearchStrategy[bytes]:
    """Draw files in place of JSON of this kind."""
    texts = st.one_of(objects(good), objects(good), objects(good), VALUES, WHOLES).map(
        lambda text: text.encode("utf-8", "surrogatepass")
    )
    cut = st.tuples(texts, st.integers(0, 60)).map(lambda pair: pair[0][: -pair[1]])
    return st.one_of(texts, texts, texts, cut, st.binary(max_size=60))


def answer(call: Callable[[], _T], *, seconds: float = 1.0, megabytes: float = 100.0) -> _T | ModelExportError:
    """Return a call's value or error; check that the error has a documented reason other than a fault of Slipway, within limits.

    Memory is what the kernel counts. Time is the processor time of this process and its children, without other programs.
    """
    before = _start_of_peak()
    begin = _processor_time()
    try:
        found: _T | ModelExportError = call()
    except ModelExportError as error:
        found = error
    finally:
        spent, peak = _processor_time() - begin, _resident("VmHWM") - before
    if isinstance(found, ModelExportError):
        assert found.reason in REASONS
        assert found.reason not in {"INTERNAL", "STAGE_ERROR"}
        for text in (str(found), *found.about.values()):
            assert len(text.encode()) < 10_000
    assert spent < seconds or spent < unhurried(seconds), f"{spent:.1f} s"
    assert peak < megabytes * 1e6, f"{peak / 1e6:.0f} MB"
    return found


def _start_of_peak() -> int:
    """Reset the kernel's peak of this process's memory; return the present memory in bytes."""
    if _STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(figure: str) -> int:
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(figure)), 0)


def _processor_time() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system

"""Make the table model × format × level of ``docs/models.md``: every row is a whole export of a tiny fine-tuned model of that kind.

``python -m support.models.kinds_table [--again] [--formats FORMAT,...] [KIND ...]``, with tests/ on the path, runs the kinds that have no result
yet. With formats, only those are made, and the other results of a kind stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.commands.cli import SLIPWAY
from support.models.current_kinds import KINDS, Kind, make_kind

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path(__file__).with_name("kinds.json")
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- kinds: made by tests/support/models/kinds_table.py -->\n", "<!-- end of kinds -->\n"
FORMATS = {
    "pytorch": ("", "int8", "int4", "fp8", "nvfp4"),
    "onnx": ("", "fp16", "int8", "int4"),
    "gguf": ("", "q8_0", "q4_k_m"),
    "adapter": ("",),
    "torchscript": ("",),
    "openvino": ("",),
}
"""Levels of each format that a row has; an empty one is the unquantized output."""
SETTINGS = (
    *("validation.benchmark_performance=false", "validation.effort=quick"),
    *("validation.on_failure=fail", "optimization.group_size=16"),
)
SHOWN = 130
"""Characters of a reason that the page shows; a longer one ends with a whole word."""
_REFUSALS = ("_UNSUPPORTED", "ADAPTER_NOT_SERVABLE")
"""Ends of the reasons of a refusal."""
PROVEN, UNFIT, UNRUN, REFUSED, FAILED = "proven", "faithful", "not run", "refused", "failed"
SIGNS = {PROVEN: "✓", UNFIT: "≈", UNRUN: "·", REFUSED: "–", FAILED: "✗"}

Row = dict[str, dict[str, str]]
"""By output: its ``state``, one of those above, and ``why`` where there is something to say."""


def run_kind(name: str, folder: Path, wanted: Collection[str] = FORMATS) -> Row:
    """Export a kind in formats of the table by the command, and return how each output ended.

    An adapter that cannot be delivered alone ends the whole command before anything runs, so that format has a command of its own.
    """
    kind = make_kind(name, folder / "kind")
    row: Row = {}
    together = [each for each in FORMATS if each in wanted and each != "adapter"]
    for formats in filter(None, (together, ["adapter"] if "adapter" in wanted else [])):
        outputs = {each: ["-".join(filter(None, (each, level))) for level in FORMATS[each]] for each in formats}
        result, judged = _export(kind, formats, folder)
        row |= {output: _ending(output, result, judged) for each in formats for output in outputs[each]}
    return row


def _export(kind: Kind, formats: Sequence[str], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the command; return what it prints, and the validation of each output."""
    asked = ",".join(f"{each}:{'+'.join(level or 'none' for level in FORMATS[each])}" for each in formats)
    out = folder / f"out-{formats[0]}"
    command = [SLIPWAY, "export", str(kind.adapter), "--base-model", str(kind.base), "-f", asked]
    command += ["--out", str(out), "--progress", "none", "--json"]
    command += [word for each in SETTINGS for word in ("--set", each)]
    environment = {**os.environ, "SLIPWAY_HOME": str(folder / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        result: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise AssertionError(f"{kind.name}: no result: {done.stderr[-2000:]}") from None
    judged: dict[str, Any] = {}
    for report in out.glob("*/report.json"):
        judged = {each["name"]: each for each in json.loads(report.read_text())["validation"]["outputs"]}
    return result, judged


def _ending(output: str, result: Mapping[str, Any], judged: Mapping[str, Any]) -> dict[str, str]:
    """Return how an output ended: what the validation says of it, or why it was not made."""
    failure = result if "failed" not in result else result["failed"].get(output)
    if failure is not None:
        refused = failure["reason"].endswith(_REFUSALS)
        why = failure["error_message"].removeprefix("stage: ")
        return {"state": REFUSED if refused else FAILED, "why": _first_part(why)}
    if output not in judged:
        return {"state": UNRUN, "why": "not validated"}
    found = judged[output]
    if found["status"] == "not_run":
        return {"state": UNRUN, "why": _first_part(found["explanation"])}
    wrong = [each["name"] for each in found["checks"] if not each["passed"] and each.get("question") == "faithful"]
    if wrong or found["status_reason"]:
        return {"state": FAILED, "why": ", ".join(wrong) or _first_part(found["explanation"])}
    return {"state": PROVEN if found["status"] == "passed" else UNFIT}


def _first_part(text: str) -> str:
    """Return what went wrong, without the remedy and without what differs from model to model."""
    return re.sub(r"\s+", " ", text.split("; ", maxsplit=1)[0]).strip()[:200]


def read_results() -> dict[str, Row]:
    """Return the committed results."""
    found: dict[str, Row] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return found


def write_results(table: Mapping[str, Row]) -> None:
    """Write the results, and the page that shows them."""
    ordered = {name: table[name] for name in KINDS if name in table}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + render(ordered) + END + after)


def render(table: Mapping[str, Row]) -> str:
    """Return the table in Markdown, and a line for each reason."""
    heads = [f"{each} {'/'.join(level or 'unquantized' for level in levels)}" for each, levels in FORMATS.items()]
    lines = ["| model | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    reasons: dict[str, str] = {}
    for name, row in table.items():
        cells = [
            " ".join(_sign(row["-".join(filter(None, (each, level)))], reasons) for level in levels)
            for each, levels in FORMATS.items()
        ]
        lines.append(f"| {KINDS[name].model} ({name}) | " + " | ".join(cells) + " |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    missing = [name for name in KINDS if name not in table]
    notes += ["", f"Not run yet as whole exports: {', '.join(missing)}."] if missing else []
    return "\n".join([*lines, "", *notes]) + "\n"


def _shown(why: str) -> str:
    """Return a reason without what differs from model to model, so that models share it."""
    plain = re.sub(r" ?\([A-Z]\w+(?:Generation|LM|Model)\)", "", why)
    plain = re.sub(r"level \w+ is not", "the level is not", plain)
    plain = re.sub(r" ?\(target_parameters.*|, first .*", "", plain)
    return plain if len(plain) <= SHOWN else f"{plain[:SHOWN].rsplit(' ', maxsplit=1)[0]} …"


def _sign(cell: Mapping[str, str], reasons: dict[str, str]) -> str:
    sign = SIGNS[cell["state"]]
    return (
        f"{sign}<sup>{reasons.setdefault(_shown(cell['why']), str(len(reasons) + 1))}</sup>"
        if cell.get("why")
        else sign
    )


def main() -> None:
    """Run the kinds without a result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="run kinds that have a result too")
    parser.add_argument("--formats", default=",".join(FORMATS), help="only these formats")
    parser.add_argument("kinds", nargs="*", help="only these kinds")
    args = parser.parse_args()
    for name in args.kinds or KINDS:
        if args.again or name not in read_results():
            with tempfile.TemporaryDirectory() as folder:
                row = read_results().get(name, {}) | run_kind(name, Path(folder), args.formats.split(","))
            write_results({**read_results(), name: row})
            print(name, {output: cell["state"] for output, cell in row.items()}, flush=True)
    write_results(read_results())


if __name__ == "__main__":
    main()

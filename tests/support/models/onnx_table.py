"""Make the table family x engine x opset x batch of ``services/onnx_export/README.md``: every cell is an export with its comparison.

``python -m support.models.onnx_table [--seconds N] [--again] [FAMILY ...]``, with tests/ on the path, runs the cells that have no result yet.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slipway.errors import Failure, ModelExportError
from slipway.stage import Context
from slipway_coordinator.lifecycle.records import AttemptRecord, TaskState
from slipway_coordinator.lifecycle.recovery import recover
from slipway_coordinator.lifecycle.rules import Profile
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE
from support.models.table_models import ROWS, Row, make_row

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "tests" / "services" / "onnx_export" / "table.json"
LOCK = Path(tempfile.gettempdir()) / "slipway-table.lock"
README = ROOT / "services" / "onnx_export" / "README.md"
BEGIN, END = "<!-- families: made by tests/support/models/onnx_table.py -->\n", "<!-- end of families -->\n"
OPSETS = (14, 17, 18, 20, 21, 23)
WRITES = {"mobius": OPSETS, "dynamo": (18, 20, 21, 23), "legacy": (14, 17)}
LETTERS = {"mobius": "M", "dynamo": "D", "legacy": "L"}
FORMS, STATIC = ("dynamic", "batch"), "static"
"""Values of the parameter ``shapes``. A graph whose axes are all fixed has results of its own: some models have none with a cache."""
LIMIT = 1e-4
PRIORITY = (
    ("mobius", 23),
    ("legacy", 17),
    ("dynamo", 23),
    ("mobius", 14),
    ("mobius", 18),
    ("legacy", 14),
    ("dynamo", 18),
)

Result = dict[str, Any]
"""A cell: the engines and rules of its attempts, the last one's opset, and its largest difference in each batch form; the same of ``static``."""
Table = dict[str, dict[str, Result]]
_REGISTRIES: dict[int, Any] = {}
"""torch's translations of operators, by opset; making them takes longer than using them."""


def cells() -> list[tuple[str, int]]:
    """List engines with the opsets they write, those first that tell most."""
    every = [(engine, opset) for engine, opsets in WRITES.items() for opset in opsets]
    return sorted(every, key=lambda cell: PRIORITY.index(cell) if cell in PRIORITY else len(PRIORITY))


class FamilyRuns:
    """The exports of one family, each made once, with what torch captures of each batch form.

    Args:
        row: The family.
        root: Folder to work in.
        known: Results of cells that are not run again: a recovery may end in one.
    """

    def __init__(self, row: Row, root: Path, known: Mapping[str, Result] = MappingProxyType({})) -> None:
        self._root, self._name, self._known = root, row.name, known
        self._source = make_row(row, root / "model")
        self._made: dict[str, tuple[dict[str, Any], Failure | None]] = {}
        self._traces: dict[Any, Any] = {}
        self._captures: dict[Any, Any] = {}
        for cell, result in known.items():
            engine, opset = cell.split()
            for shapes, difference in zip(FORMS, result["differences"], strict=True):
                if len(result["attempts"]) == 1:
                    facts = {"engine": engine, "opset": int(opset), "parity_max_abs_diff": difference}
                    self._made[_key({"engine": engine, "opset": int(opset), "shapes": shapes})] = facts, None
            fixed = result.get(STATIC)
            if fixed and len(fixed["attempts"]) == 1:
                facts = {"engine": engine, "opset": int(opset), "parity_max_abs_diff": max(fixed["differences"])}
                self._made[_key({"engine": engine, "opset": int(opset), "shapes": STATIC})] = facts, None
        gc.freeze()  # what is imported is not searched for garbage again

    def cell(self, engine: str, opset: int) -> Result:
        """Export in both batch forms and with fixed axes, with the recovery that the rules of the stage prescribe."""
        known = self._known.get(f"{engine} {opset}")
        return {**(known or self._varying(engine, opset)), STATIC: self._fixed(engine, opset)}

    def _varying(self, engine: str, opset: int) -> Result:
        forms = [self._recovered({"engine": engine, "opset": opset, "shapes": shapes}) for shapes in FORMS]
        assert forms[0]["attempts"] == forms[1]["attempts"], "both batch forms end alike"
        differences = [form.pop("difference") for form in forms]
        assert max(differences) < LIMIT
        return {**forms[0], "differences": differences}

    def _fixed(self, engine: str, opset: int) -> Result:
        form = self._recovered({"engine": engine, "opset": opset, "shapes": STATIC})
        difference = form.pop("difference")
        assert difference < LIMIT
        return {**form, "differences": [difference]}

    def _recovered(self, params: dict[str, Any]) -> Result:
        attempts: list[str] = []
        history: list[AttemptRecord] = []
        while True:
            facts, failure = self._run(params)
            attempts.append(params["engine"] if params["engine"] != "auto" else facts.get("engine", "auto"))
            if failure is None:
                return {"attempts": attempts, "opset": facts["opset"], "difference": facts["parity_max_abs_diff"]}
            rule = attempts[-2] if len(attempts) > 1 else ""
            history.append(
                AttemptRecord(number=len(history), state=TaskState.FAILED, params=params, failure=failure, rule=rule)
            )
            found = recover(
                failure,
                "onnx_export",
                params=params,
                history=history,
                profile=Profile.BALANCED,
                facts={},
                max_attempts=6,
            )
            if found is None:
                raise AssertionError(
                    f"no recovery of {self._source.parent.name} {params}: {failure.reason}: {failure.message}"
                )
            attempts.append(found.rule)
            params = dict(found.params)

    def _run(self, params: dict[str, Any]) -> tuple[dict[str, Any], Failure | None]:
        key = _key(params)
        if key not in self._made:
            with tempfile.TemporaryDirectory(dir=self._root) as work, self._capturing_once(), self._tracing_once():
                context = Context(workdir=Path(work))
                try:
                    STAGE.run({"pytorch": self._source}, OnnxExportParams(**params), context)
                    self._made[key] = dict(context.facts), None
                except ModelExportError as error:
                    self._made[key] = {}, error.failure()
        return self._made[key]

    @contextmanager
    def _capturing_once(self) -> Iterator[None]:
        """Let torch return what it captured and decomposed before of the same part of the model.

        A capture does not depend on the opset. Its decomposition depends on it only by the operators that have a translation.
        """
        import torch
        from torch.onnx._internal.exporter import _core, _decomp, _registration

        capture, decompose = torch.export.export, _core._prepare_exported_program_for_export
        registry = vars(_registration.ONNXRegistry)["from_torchlib"]

        def captured(module: Any, args: Any, *more: Any, **named: Any) -> Any:
            shapes = tuple(tuple(value.shape) for value in args)  # those of an encoder and its decoder differ in number
            key = module.model.config._attn_implementation, module._outputs, shapes
            if key not in self._captures:
                self._captures[key] = capture(module, args, *more, **named)
            return self._captures[key]

        def decomposed(program: Any, *, registry: Any) -> Any:
            key = id(program), frozenset(map(str, _decomp.get_onnx_implemented_overloads(registry)))
            if key not in self._captures:
                self._captures[key] = decompose(program, registry=registry)
            return self._captures[key]

        def registered(*, opset_version: int) -> Any:
            if opset_version not in _REGISTRIES:
                _REGISTRIES[opset_version] = registry.__func__(_registration.ONNXRegistry, opset_version)
            return _REGISTRIES[opset_version]

        torch.export.export = captured
        _core._prepare_exported_program_for_export = decomposed
        _registration.ONNXRegistry.from_torchlib = staticmethod(registered)  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.export.export = capture
            _core._prepare_exported_program_for_export = decompose
            _registration.ONNXRegistry.from_torchlib = registry

    @contextmanager
    def _tracing_once(self) -> Iterator[None]:
        """Let the tracers return what they traced before for the same graph and opset."""
        import onnx_ir as ir

        from slipway_onnx_export.engines import dynamo, legacy

        originals = {module: module._trace for module in (dynamo, legacy)}

        def once(module: Any) -> Any:
            def trace(component: Any, whole: Any, source: Any, *, opset: int) -> Any:
                ports = tuple((port.name, port.shape) for port in (*component.inputs, *component.outputs))
                key = module.__name__, component.name, ports, whole.config._attn_implementation, opset
                if key not in self._traces:
                    found = originals[module](component, whole, source, opset=opset)
                    model, more = (found[0], found[1:]) if isinstance(found, tuple) else (found, ())
                    self._traces[key] = ir.to_proto(model), more
                proto, more = self._traces[key]
                return (ir.from_proto(proto), *more) if more else ir.from_proto(proto)

            return trace

        for module in originals:
            module._trace = once(module)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for module, original in originals.items():
                module._trace = original  # type: ignore[attr-defined]


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)


def outcome(result: Result) -> list[tuple[list[str], int]]:
    """Return what a further run of a cell must repeat; differences depend on the processor."""
    return [(each["attempts"], each["opset"]) for each in (result, result.get(STATIC)) if each]


def run_row(
    row: Row,
    known: Mapping[str, Result] = MappingProxyType({}),
    *,
    until: float = float("inf"),
    only: tuple[str, ...] = (),
) -> Iterator[tuple[str, Result]]:
    """Run the cells of a family that are not known, as long as time allows."""
    missing = [cell for cell in cells() if STATIC not in known.get(f"{cell[0]} {cell[1]}", {})]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = FamilyRuns(row, Path(folder), known)
        for engine, opset in missing:
            key = f"{engine} {opset}"
            if (not only or key in only) and time.monotonic() < until:
                yield key, runs.cell(engine, opset)


def read_results() -> Table:
    """Return the committed results."""
    found: Table = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return found


def write_results(table: Table) -> None:
    """Write the results and the section of the README that shows them."""
    ordered = {row.name: table[row.name] for row in ROWS if row.name in table}
    new = RESULTS.with_suffix(".new")
    new.write_text(json.dumps(ordered, indent=1) + "\n")
    new.replace(RESULTS)  # others may read it now
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(before + BEGIN + render(ordered) + END + after)


def render(table: Table) -> str:
    """Return the tables in Markdown: with axes that vary, and with fixed ones."""
    legend: dict[str, str] = {}
    fixed = {
        name: {cell: found[STATIC] for cell, found in row.items() if STATIC in found} for name, row in table.items()
    }
    parts = [_rows(table, legend), "", "With every axis fixed (`shapes: static`):", "", _rows(fixed, legend), ""]
    return "\n".join([*parts, *(f"- {mark}: {rules}" for rules, mark in legend.items())]) + "\n"


def _rows(table: Table, legend: dict[str, str]) -> str:
    lines = [
        "| family | " + " | ".join(map(str, OPSETS)) + " | recovered | largest difference |",
        "|---" * (len(OPSETS) + 3) + "|",
    ]
    for row in ROWS:
        results = table.get(row.name, {})
        entries = []
        for opset in OPSETS:
            letters = [
                _letter(engine, results.get(f"{engine} {opset}"))
                for engine, opsets in WRITES.items()
                if opset in opsets
            ]
            entries.append(" ".join(letters))
        recovered = sorted({_recovery(result, legend) for result in results.values() if len(result["attempts"]) > 1})
        differences = [value for result in results.values() for value in result["differences"]]
        worst = f"{max(differences):.0e}" if differences else ""
        lines.append(f"| {row.name} | {' | '.join(entries)} | {', '.join(recovered)} | {worst} |")
    return "\n".join(lines)


def _mark(number: int) -> str:
    """Return a, b … z, aa, ab …"""
    return (_mark(number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)


def _letter(engine: str, result: Result | None) -> str:
    """Return an engine's letter: lower case if a recovery made the graph, in parentheses if the cell was not run."""
    letter = LETTERS[engine]
    if result is None:
        return f"({letter})"
    return letter if len(result["attempts"]) == 1 else letter.lower()


def _recovery(result: Result, legend: dict[str, str]) -> str:
    engines, rules = result["attempts"][::2], result["attempts"][1::2]
    path = "→".join(LETTERS[engine] for engine in engines)
    mark = legend.setdefault(", ".join(f"`{rule}`" for rule in rules), f"({_mark(len(legend))})")
    return f"{path} at {result['opset']} {mark}"


def main() -> None:
    """Run the cells without a result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell after this time")
    parser.add_argument(
        "--again", action="store_true", help="measure cells that have a result too; they must end as before"
    )
    parser.add_argument("--cell", action="append", default=[], help='only these cells, as "mobius 23"')
    parser.add_argument("families", nargs="*", help="only these families")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    until = time.monotonic() + args.seconds
    for row in ROWS:
        if time.monotonic() < until and (not args.families or row.name in args.families):
            before = read_results().get(row.name, {})
            for cell, result in run_row(row, {} if args.again else before, until=until, only=tuple(args.cell)):
                old = outcome(before.get(cell, result))
                if old != outcome(result)[: len(old)]:
                    raise AssertionError(f"{row.name} {cell} ended as {old}, now as {outcome(result)}")
                add_results(row, {cell: result})
                print(row.name, cell, result["attempts"], f"{max(result['differences']):.1e}", flush=True)


def add_results(row: Row, found: Mapping[str, Result]) -> None:
    """Write results of a family beside those of others, which another process may write at the same time."""
    with LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = read_results()
        write_results({**table, row.name: {**table.get(row.name, {}), **found}})


if __name__ == "__main__":
    main()

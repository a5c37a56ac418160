"""Quantize some files of a checkpoint as one task, and join the files of all tasks to the folder that one quantization writes.

What is decided before the first weight is read (layers, bits, files) follows from headers and parameters, so every part decides it alike.
A part reads the tensors of its own files. Sums of squares are kept piece by piece, because the sum of floats depends on the order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipway.files.regular_file import sha256_of
from slipway.model.safetensors_layout import PlannedFile
from slipway.model.weights.divided_files import (
    FilesRecord,
    PlannedShard,
    check_files,
    join_files,
    read_records,
)
from slipway.parts import Part
from slipway.stage import Context
from slipway_quantize.report import Outcome, write_report

Squares = tuple[float, float]


@dataclass
class PartWork:
    """What one part writes.

    Attributes:
        part: The part.
        folder: Folder of its files.
        planned: All files of the whole model.
        squares: Sums of squares of each piece of its weights, in order.
    """

    part: Part
    folder: Path
    planned: Sequence[PlannedFile] = ()
    squares: list[Squares] = field(default_factory=list)

    @property
    def files(self) -> tuple[PlannedFile, ...]:
        """The files of this part."""
        return self.part.share_of(self.planned)


class QuantizeRecord(FilesRecord):
    """What a part of a quantization did.

    Attributes:
        params: Parameters of the part.
        settings: Settings for the report.
        outcome: The outcome for each weight of the whole model, without sums.
        squares: Sums of squares of each piece of this part's weights.
        before_bytes: Size of the source's weights.
        other_bytes: Size of the weights of other modules, which are copied.
        warnings: Warnings for the user.
    """

    params: dict[str, Any]
    settings: dict[str, Any]
    outcome: Outcome
    squares: list[Squares]
    before_bytes: int
    other_bytes: int
    warnings: list[str]


def write_record(
    work: PartWork,
    outcome: Outcome,
    *,
    params: Mapping[str, Any],
    settings: Mapping[str, Any],
    before_bytes: int,
    other_bytes: int,
    ctx: Context,
) -> None:
    """Hash the written files of a part, and write its record beside them."""
    written = {}
    for file in work.files:
        path = work.folder / file.filename
        written[file.filename] = sha256_of(path)
        ctx.digest(path, written[file.filename])
    record = QuantizeRecord(
        part=work.part.number,
        parts=work.part.of,
        plan=[_describe(file) for file in work.planned],
        written=written,
        weight_map={tensor.name: file.filename for file in work.files for tensor in file.tensors},
        data_bytes=sum(tensor.nbytes for file in work.files for tensor in file.tensors),
        params=dict(params),
        settings=dict(settings),
        outcome=outcome,
        squares=work.squares,
        before_bytes=before_bytes,
        other_bytes=other_bytes,
        warnings=ctx.facts.pop("warnings", []),  # they are those of every part, and the join's to give
    )
    record.write(work.folder)
    ctx.record(files=list(written), part_bytes=sum(file.nbytes for file in work.files))


def join_parts(parts: Mapping[str, Path], ctx: Context) -> Path:
    """Prove that the parts make the planned folder, adopt their weights, and write the report. Return the folder.

    Raises:
        StageError: ``PARTS_DIFFER``.
    """
    ctx.progress("join", done=0, total=len(parts), unit="parts")
    by_input = read_records(parts, QuantizeRecord)
    records = list(by_input.values())
    check_files(records, same=("params", "settings", "outcome", "before_bytes", "warnings"))
    output = ctx.workdir / "model"
    join_files(parts, by_input, output, ctx)
    first = records[0]
    outcome = first.outcome
    for record in records:
        for error, energy in record.squares:
            outcome.error_energy += error
            outcome.weight_energy += energy
    for warning in first.warnings:
        ctx.warn(warning)
    after = sum(file.nbytes for file in first.plan) + first.other_bytes
    write_report(output, outcome, before=first.before_bytes, after=after, settings=first.settings, ctx=ctx)
    ctx.record(check="not run: the weights were made in parts")
    ctx.progress("join", done=len(parts), total=len(parts), unit="parts")
    return output


def _describe(file: PlannedFile) -> PlannedShard:
    return PlannedShard(name=file.filename, identity=hashlib.sha256(file.header).hexdigest(), nbytes=file.nbytes)

"""Merge some of a model's files as one task, and join the files of all tasks to the model that one merge writes.

Every part plans the whole merge, which reads only headers and compares what the adapter replaces, and writes its range of the planned
files. So each part knows the whole plan, and the join compares them: all parts had the same plan, every planned file is there once, and
every tensor of the adapter went into the weights for which it was planned, in one part each. The join reads no weights.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipway.errors import ModelMergeError
from slipway.model.weights.divided_files import (
    FilesRecord,
    PlannedShard,
    check_files,
    join_files,
    parts_differ_error,
    read_records,
)
from slipway.parts import Part
from slipway.stage import Context
from slipway_merge.conclusion import Results, conclude
from slipway_merge.merge import PlannedMerge, plan_merge
from slipway_merge.params import MergeParams
from slipway_merge.tensors.outputs import Layout, OutputTensor
from slipway_merge.writing.output_file import shard_identity

_ANY = ("arithmetic",)
"""Facts that may differ between parts: their machines may have other instructions."""


class MergeRecord(FilesRecord):
    """What a part of a merge did.

    Attributes:
        adapter: Names of all tensors of the adapter.
        unused: Those that the plan of the whole merge uses for no weight, such as copies of others.
        used: Each tensor of the adapter with a weight of this part for which it was used.
        facts: Facts about the whole merge.
        replaced: Whether the adapter brings values that differ from the base's.
        warnings: Warnings of the plan.
        results: Results of this part.
    """

    adapter: list[str]
    unused: list[str]
    used: list[tuple[str, str]]
    facts: dict[str, Any]
    replaced: bool
    warnings: list[str]
    results: Results


def merge_part(inputs: Mapping[str, Path], params: MergeParams, part: Part, ctx: Context) -> Path:
    """Write one part's range of the merged model's files; the first part writes the small files, too. Return the folder.

    Raises:
        ModelMergeError, CheckpointValidationError: as for the whole merge.
    """
    output = ctx.workdir / "part"
    small = output if part.is_first else ctx.workdir / "small"
    with plan_merge(inputs["base"], inputs["adapter"], small, params=params, ctx=ctx) as planned:
        output.mkdir(exist_ok=True)
        layout = Layout(part.share_of(planned.layout.shards), partial=True)
        results = planned.write(layout, output, params=params, ctx=ctx) if layout.shards else Results.joined(())
    _record(planned, layout, part, results, ctx).write(output)
    ctx.record(
        files=[shard.filename for shard in layout.shards],
        part_bytes=sum(shard.nbytes for shard in layout.shards),
        shards_resumed=results.resumed,
    )
    return output


def join_parts(parts: Mapping[str, Path], params: MergeParams, ctx: Context) -> Path:  # noqa: ARG001 - the parts had them
    """Prove that the parts make the planned model, write its small files, and adopt the parts' weights. Return the folder.

    Raises:
        StageError: ``PARTS_DIFFER``.
        ModelMergeError: ``MERGE_NOT_VERIFIED`` if a tensor was not checked or used, or twice; ``ADAPTER_NO_EFFECT``.
    """
    ctx.progress("join", done=0, total=len(parts), unit="parts")
    by_input = read_records(parts, MergeRecord)
    records = list(by_input.values())
    check_files(records, same=("adapter", "unused", "replaced", "warnings"))
    _check_facts(records)
    _check_checked(records)
    _check_adapter(records)
    output = ctx.workdir / "pytorch"
    join_files(parts, by_input, output, ctx)
    first = records[0]
    machines = sorted({str(record.facts["arithmetic"]) for record in records})
    conclude(
        Results.joined(record.results for record in records),
        {**first.facts, "arithmetic": ", ".join(machines)},
        replaced=first.replaced,
        warnings=first.warnings,
        ctx=ctx,
    )
    ctx.progress("join", done=len(parts), total=len(parts), unit="parts")
    return output


def _record(planned: PlannedMerge, layout: Layout, part: Part, results: Results, ctx: Context) -> MergeRecord:
    digests = {path.name: digest.removeprefix("sha256:") for path, digest in ctx.digests.items()}
    everywhere = {name for tensor in planned.layout.tensors() for name in _used(planned, tensor)}
    names = sorted(info.name for info in planned.adapter.tensors())
    return MergeRecord(
        part=part.number,
        parts=part.of,
        plan=[
            PlannedShard(name=shard.filename, identity=shard_identity(shard), nbytes=shard.nbytes)
            for shard in planned.layout.shards
        ],
        written={shard.filename: digests.get(shard.filename, "") for shard in layout.shards},
        weight_map={tensor.name: shard.filename for shard in layout.shards for tensor in shard.tensors},
        data_bytes=layout.data_bytes,
        adapter=names,
        unused=[name for name in names if name not in everywhere],
        used=[(name, tensor.name) for tensor in layout.tensors() for name in _used(planned, tensor)],
        # As another part reads it: a tuple is a list in JSON.
        facts=json.loads(json.dumps(planned.facts)),
        replaced=planned.replaced,
        warnings=list(planned.warnings),
        results=results,
    )


def _used(planned: PlannedMerge, tensor: OutputTensor) -> Iterator[str]:
    """Yield the names of the adapter's tensors of which an output tensor is made."""
    value = tensor.value
    if value.source.file.parent == planned.adapter_folder:
        yield value.source.name
    if value.update is not None:
        yield value.update.left.info.name
        yield value.update.right.info.name
    if value.computed is not None:
        yield from sorted({info.name for info in value.computed.tensors})


def _check_facts(records: Sequence[MergeRecord]) -> None:
    first = records[0]
    for number, record in enumerate(records, 1):
        names = record.facts.keys() | first.facts.keys()
        different = sorted(name for name in names - set(_ANY) if record.facts.get(name) != first.facts.get(name))
        if different:
            raise parts_differ_error(f"part {number} found another {different[0]} than part 1")


def _check_checked(records: Sequence[MergeRecord]) -> None:
    """Check that rows of every written tensor were checked."""
    for record in records:
        checked = record.results.verified["tensors"]
        if checked != len(record.weight_map):
            raise _join_error(f"part {record.part} checked {checked} of its {len(record.weight_map)} tensors")


def _check_adapter(records: Sequence[MergeRecord]) -> None:
    """Check that every tensor of the adapter is accounted for: used for each of its weights in one part, or for none by the plan."""
    first = records[0]
    uses = Counter(pair for record in records for pair in record.used)
    twice = sorted(pair for pair, count in uses.items() if count > 1)
    if twice:
        raise _join_error(f"{twice[0][0]!r} was used twice for {twice[0][1]!r}", tensor=twice[0][0])
    used = {name for name, _ in uses}
    lost = sorted(set(first.adapter) - used - set(first.unused))
    strange = sorted((used - set(first.adapter)) | (used & set(first.unused)))
    if lost or strange:
        name = (lost or strange)[0]
        raise _join_error(f"no part used {name!r}" if lost else f"the plan does not use {name!r}", tensor=name)


def _join_error(what: str, **about: object) -> ModelMergeError:
    return ModelMergeError(
        f"the parts of the merge do not make the planned model: {what}",
        reason="MERGE_NOT_VERIFIED",
        remedy="run it again; if it happens again, this is an error in Slipway: please report it",
        about=about,
    )

"""Merge some of a model's files as one task, and join the files of all tasks to the model that one merge writes.

Every part plans the whole merge, which reads only headers and compares what the adapter replaces, and writes its range of the planned
files. So each part knows the whole plan, and the join compares them: all parts had the same plan, every planned file is there once, and
every tensor of the adapter went into the weights for which it was planned, in one part each. The join reads no weights.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from slipway.contracts.division import Part
from slipway.errors import ModelMergeError
from slipway.files.json_documents import LARGEST_LIST
from slipway.files.paths import all_files
from slipway.files.regular_file import read_regular
from slipway.model.safetensors_file import INDEX_SUFFIX
from slipway.model.safetensors_layout import index_file
from slipway.model.weights.reading import DEFERRED
from slipway.stage import Context
from slipway_merge.conclusion import Results, conclude
from slipway_merge.merge import PlannedMerge, plan_merge
from slipway_merge.params import MergeParams
from slipway_merge.tensors.outputs import Layout, OutputTensor, Shard
from slipway_merge.writing.output_file import shard_identity

RECORD = "merge-part.json"
"""File of a part's output that says what the part did."""

WEIGHTS = "*.safetensors"
_ANY_PART = ("arithmetic",)
"""Facts that may differ between parts: their machines may have other instructions."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", ser_json_inf_nan="constants")


class _File(_Model):
    """A file of the plan.

    Attributes:
        name: Its name.
        identity: Digest of the plan of its bytes.
        nbytes: Its size.
    """

    name: str
    identity: str
    nbytes: int


class _Record(_Model):
    """What a part did.

    Attributes:
        version: Version of this document.
        part: Number of the part, from 1.
        parts: Number of parts.
        plan: All files of the whole merge, in order.
        written: SHA-256 of each file of this part; empty texts if weights are left out.
        weight_map: File of each tensor of this part.
        data_bytes: Bytes of the tensors of this part.
        adapter: Names of all tensors of the adapter.
        unused: Those that the plan of the whole merge uses for no weight, such as copies of others.
        used: Each tensor of the adapter with a weight of this part for which it was used.
        facts: Facts about the whole merge.
        replaced: Whether the adapter brings values that differ from the base's.
        warnings: Warnings of the plan.
        results: Results of this part.
    """

    version: int = 1
    part: int
    parts: int
    plan: list[_File]
    written: dict[str, str]
    weight_map: dict[str, str]
    data_bytes: int
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
        layout = Layout(_range(planned.layout.shards, part), partial=True)
        results = planned.write(layout, output, params=params, ctx=ctx) if layout.shards else Results.joined(())
    (output / RECORD).write_text(
        _record(planned, layout, part, results, ctx).model_dump_json() + "\n", encoding="utf-8"
    )
    ctx.record(
        part=part.number,
        parts=part.of,
        files=[shard.filename for shard in layout.shards],
        part_bytes=sum(shard.nbytes for shard in layout.shards),
        shards_resumed=results.resumed,
    )
    return output


def join_parts(parts: Mapping[str, Path], params: MergeParams, ctx: Context) -> Path:  # noqa: ARG001 - the parts had them
    """Prove that the parts make the planned model, write its small files, and adopt the parts' weights. Return the folder.

    Raises:
        ModelMergeError: ``MERGE_NOT_VERIFIED`` if something is missing, there twice, or of another plan; ``ADAPTER_NO_EFFECT``.
    """
    ctx.progress("join", done=0, total=len(parts), unit="parts")
    records = {name: _read(folder) for name, folder in parts.items()}
    _check_same_plan(list(records.values()))
    _check_files(list(records.values()))
    _check_adapter(list(records.values()))
    first, *_ = records.values()
    output = ctx.workdir / "pytorch"
    _copy_small_files(next(iter(parts.values())), output)
    stored = first.facts["weights"] == "stored"
    for name, record in records.items():
        for file, sha256 in record.written.items() if stored else ():
            ctx.adopt(name, file, f"sha256:{sha256}")
    weight_map = {tensor: file for record in records.values() for tensor, file in record.weight_map.items()}
    index = index_file(weight_map, total_bytes=sum(record.data_bytes for record in records.values()))
    if stored and index:
        (output / index[0]).write_text(index[1], encoding="utf-8")
    results = Results.joined(record.results for record in records.values())
    machines = sorted({str(record.facts["arithmetic"]) for record in records.values()})
    facts = {**first.facts, "arithmetic": ", ".join(machines)}
    conclude(results, facts, replaced=first.replaced, warnings=first.warnings, ctx=ctx)
    ctx.progress("join", done=len(parts), total=len(parts), unit="parts")
    return output


def _range(shards: Sequence[Shard], part: Part) -> tuple[Shard, ...]:
    """Return the files of a part. All have about the same size, so the parts have too."""
    first, end = (len(shards) * number // part.of for number in (part.number - 1, part.number))
    return tuple(shards[first:end])


def _record(planned: PlannedMerge, layout: Layout, part: Part, results: Results, ctx: Context) -> _Record:
    digests = {path.name: digest.removeprefix("sha256:") for path, digest in ctx.digests.items()}
    everywhere = {name for tensor in planned.layout.tensors() for name in _used(planned, tensor)}
    names = sorted(info.name for info in planned.adapter.tensors())
    return _Record(
        part=part.number,
        parts=part.of,
        plan=[
            _File(name=shard.filename, identity=shard_identity(shard), nbytes=shard.nbytes)
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


def _read(folder: Path) -> _Record:
    try:
        return _Record.model_validate_json(read_regular(folder / RECORD, largest=LARGEST_LIST))
    except (OSError, ValidationError) as error:
        raise _join_error(f"{RECORD} cannot be read ({str(error).splitlines()[0]})", file=RECORD) from error


def _check_same_plan(records: Sequence[_Record]) -> None:
    """Check that the records are those of all parts, in order, of one merge."""
    first = records[0]
    for number, record in enumerate(records, 1):
        if (record.version, record.part, record.parts) != (1, number, len(records)):
            raise _join_error(f"part {number} of {len(records)} is part {record.part} of {record.parts}")
        for name in ("plan", "adapter", "unused", "replaced", "warnings"):
            if getattr(record, name) != getattr(first, name):
                raise _join_error(f"part {number} had another {name} than part 1")
        facts = {
            key for key in record.facts.keys() | first.facts.keys() if record.facts.get(key) != first.facts.get(key)
        }
        if different := sorted(facts - set(_ANY_PART)):
            raise _join_error(f"part {number} found another {different[0]} than part 1")


def _check_files(records: Sequence[_Record]) -> None:
    """Check that the parts wrote every planned file once, in order, with every tensor in one of them."""
    planned, written = (
        [file.name for file in records[0].plan],
        [name for record in records for name in record.written],
    )
    if planned != written:
        different = next((name for name in (*planned, *written) if planned.count(name) != written.count(name)), "")
        raise _join_error(
            f"the parts wrote {len(written)} files instead of {len(planned)}, or in another order", file=different
        )
    counts = Counter(tensor for record in records for tensor in record.weight_map)
    twice = sorted(tensor for tensor, count in counts.items() if count > 1)
    if twice:
        raise _join_error(f"two parts wrote the tensor {twice[0]!r}", tensor=twice[0])
    for record in records:
        checked = record.results.verified["tensors"]
        if checked != len(record.weight_map):
            raise _join_error(f"part {record.part} checked {checked} of its {len(record.weight_map)} tensors")


def _check_adapter(records: Sequence[_Record]) -> None:
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


def _copy_small_files(part: Path, output: Path) -> None:
    """Copy what the first part wrote beside the weights."""
    output.mkdir()
    for name, path in all_files(part):
        if name == RECORD or (name.endswith((".safetensors", INDEX_SUFFIX)) and name != DEFERRED):
            continue
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, output / name)


def _join_error(what: str, **about: object) -> ModelMergeError:
    return ModelMergeError(
        f"the parts of the merge do not make the planned model: {what}",
        reason="MERGE_NOT_VERIFIED",
        remedy="run it again; if it happens again, let workers of one version do all parts, or please report it",
        about=about,
    )

"""The weights files of a model that several tasks write, each some of them, and one joins (:mod:`slipway.division`).

Every part knows the plan of all files, and notes in a record which of them it wrote. The join compares the records, which proves that the
files make one model, and names the files again in its own output without reading them.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from slipway.errors import StageError
from slipway.files.json_documents import LARGEST_LIST
from slipway.files.paths import all_files
from slipway.files.regular_file import read_regular
from slipway.model.safetensors_file import INDEX_SUFFIX
from slipway.model.safetensors_layout import index_file
from slipway.stage import Context

RECORD = "part.json"
"""File of a part's output that says what the part did."""

WEIGHTS = ("model.safetensors", "model-?????-of-?????.safetensors")
"""Patterns of the paths of a model's weights files; the modules of a sentence encoder have theirs in folders."""


class DividedModel(BaseModel):
    """Base of what is stored in a record."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", ser_json_inf_nan="constants")


class PlannedShard(DividedModel):
    """A file of the plan.

    Attributes:
        name: Its name.
        identity: Digest of the plan of its bytes.
        nbytes: Its size.
    """

    name: str
    identity: str
    nbytes: int


class FilesRecord(DividedModel):
    """What a part did.

    Attributes:
        version: Version of this document.
        part: Number of the part, from 1.
        parts: Number of parts.
        plan: All files of the whole model, in order.
        written: SHA-256 of each file of this part, in order; empty texts if weights are left out.
        weight_map: File of each tensor of this part.
        data_bytes: Bytes of the tensors of this part.
    """

    version: int = 1
    part: int
    parts: int
    plan: list[PlannedShard]
    written: dict[str, str]
    weight_map: dict[str, str]
    data_bytes: int

    def write(self, folder: Path) -> None:
        """Write the record into a part's folder."""
        (folder / RECORD).write_text(self.model_dump_json() + "\n", encoding="utf-8")


_R = TypeVar("_R", bound=FilesRecord)


def read_records(parts: Mapping[str, Path], kind: type[_R]) -> dict[str, _R]:
    """Read the records of all parts, given in order by the names of the inputs.

    Raises:
        StageError: ``PARTS_DIFFER`` if one cannot be read.
    """
    records = {}
    for name, folder in parts.items():
        try:
            records[name] = kind.model_validate_json(read_regular(folder / RECORD, largest=LARGEST_LIST))
        except (OSError, ValidationError) as error:
            raise parts_differ_error(f"{RECORD} of {name} cannot be read ({str(error).splitlines()[0]})") from error
    return records


def check_files(records: Sequence[FilesRecord], *, same: Collection[str]) -> None:
    """Check that the records are those of all parts of one plan, in order, which wrote every planned file and tensor once.

    Args:
        records: The records in the order of the parts.
        same: Names of further fields that must be the same in all of them.

    Raises:
        StageError: ``PARTS_DIFFER``.
    """
    first = records[0]
    for number, record in enumerate(records, 1):
        if (record.version, record.part, record.parts) != (1, number, len(records)):
            raise parts_differ_error(f"part {number} of {len(records)} is part {record.part} of {record.parts}")
        for name in ("plan", *sorted(same)):
            if getattr(record, name) != getattr(first, name):
                raise parts_differ_error(f"part {number} has another {name} than part 1")
    planned, written = [file.name for file in first.plan], [name for record in records for name in record.written]
    if planned != written:
        different = next((name for name in (*planned, *written) if planned.count(name) != written.count(name)), "")
        why = f"they wrote {len(written)} files instead of {len(planned)}, or in another order"
        raise parts_differ_error(why, file=different)
    counts = Counter(tensor for record in records for tensor in record.weight_map)
    if twice := sorted(tensor for tensor, count in counts.items() if count > 1):
        raise parts_differ_error(f"two of them wrote the tensor {twice[0]!r}", tensor=twice[0])


def join_files(parts: Mapping[str, Path], records: Mapping[str, FilesRecord], output: Path, ctx: Context) -> None:
    """Make the joined folder: copy the small files of the first part, adopt the weights of all, and write their index.

    Args:
        parts: The folders of the parts by the names of the inputs.
        records: Their records, which were checked.
        output: The folder to make.
        ctx: Context of the join.
    """
    output.mkdir()
    own = {RECORD, *(name for record in records.values() for name in record.written)}
    for name, path in all_files(next(iter(parts.values()))):
        if name not in own and name != f"model{INDEX_SUFFIX}":
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, output / name)
    for name, record in records.items():
        for file, sha256 in record.written.items():
            if sha256:
                ctx.adopt(name, file, f"sha256:{sha256}")
    if all(sha256 for record in records.values() for sha256 in record.written.values()):
        weight_map = {tensor: file for record in records.values() for tensor, file in record.weight_map.items()}
        index = index_file(weight_map, total_bytes=sum(record.data_bytes for record in records.values()))
        if index:
            (output / index[0]).write_text(index[1], encoding="utf-8")


def parts_differ_error(what: str, **about: object) -> StageError:
    """Return the error of parts that do not make one model."""
    return StageError(
        f"the parts do not make one model: {what}",
        reason="PARTS_DIFFER",
        remedy="let workers of one version do all parts, or set execution.split_bytes to 0",
        about=about,
    )

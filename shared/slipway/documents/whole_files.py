"""Read JSON and Parquet files, which cannot be read in part, in the process that :mod:`slipway.documents.reader` starts."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from slipway.documents.reader import LARGEST_LINE, MOST_TEXT, Purpose, Row, invalid_text_error
from slipway.files.json_documents import read_json
from slipway.files.regular_file import open_regular
from slipway.sizes import format_size

_LARGEST = 64 << 20
"""Most bytes of a file, packed and unpacked, and of a batch of rows when it is decoded."""
_MOST_VALUES = 4 << 20
"""Most values in the columns that are read; a value that is repeated takes a bit in the file, and a hundred bytes here."""
_ROWS = 32


def rows(path: str, name: str, purpose: str, columns: Sequence[str]) -> Iterator[Row]:
    """Yield each row of a file with its place. An object keeps only the named values, or its names if it has none of them.

    Raises:
        ModelExportError: The file cannot be used, with the reason of the purpose.
    """
    use = Purpose(purpose)
    read = (
        _read_parquet(Path(path), name, use, columns)
        if path.lower().endswith(".parquet")
        else _read_list(Path(path), name, use)
    )
    try:
        for row, where in read:
            yield _keep_columns(row, where, use, columns), where
    except OSError as error:
        raise invalid_text_error(use, f"{name} cannot be read ({error.strerror or error})", file=name) from error


def _keep_columns(row: Any, where: str, purpose: Purpose, columns: Sequence[str]) -> Any:
    if not isinstance(row, dict):
        return row[:MOST_TEXT] if isinstance(row, str) else None
    kept: dict[str, Any] = {key: row[key] for key in columns if key in row} or dict.fromkeys(sorted(row)[:8])
    text = kept.pop("text", None)
    kept = _make_plain(kept)
    if len(json.dumps(kept)) > LARGEST_LINE:
        raise invalid_text_error(
            purpose, f"{where} has more than {format_size(LARGEST_LINE)} beside its text", file=where
        )
    return kept | ({"text": text[:MOST_TEXT]} if isinstance(text, str) else {})


def _make_plain(values: Any) -> Any:
    """Return values with text in place of what only Parquet has, such as bytes and times."""
    return json.loads(json.dumps(values, default=lambda value: f"<{type(value).__name__}>"))


def _read_list(path: Path, name: str, purpose: Purpose) -> Iterator[Row]:
    try:
        entries = read_json(path, largest=_LARGEST, lenient=True)
    except ValueError as error:
        raise invalid_text_error(purpose, f"{name} is not JSON ({error})", file=name) from error
    if isinstance(entries, dict):
        entries = [entries] if "messages" in entries else next(filter(_is_rows, entries.values()), None)
    if not isinstance(entries, list):
        raise invalid_text_error(purpose, f"{name} holds no list of documents", file=name)
    for number, row in enumerate(entries, 1):
        yield row, f"{name}, entry {number}"


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _read_parquet(path: Path, name: str, purpose: Purpose, wanted: Sequence[str]) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]

    with open_regular(path) as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise OSError(errno.EFBIG, f"larger than {format_size(_LARGEST)}", name)
    try:
        table = parquet.ParquetFile(BytesIO(data))
        columns = [column for column in table.schema_arrow.names if column in wanted]
        _check_unpacked(table.metadata, columns, name)
        # Keep texts that are stored once as they are until their size is known; the library cannot do that for texts of messages.
        flat = [name for name in columns if _is_text(table.schema_arrow.field(name).type)]
        table = parquet.ParquetFile(BytesIO(data), read_dictionary=flat)
        number = 0
        for batch in table.iter_batches(batch_size=_ROWS, columns=columns, use_threads=False):
            _check_decoded(batch, name)
            for row in batch.to_pylist():
                number += 1
                yield row, f"{name}, row {number}"
    except (ArrowException, UnicodeDecodeError) as error:
        if isinstance(error, MemoryError):
            raise
        raise invalid_text_error(purpose, f"{name} is not a Parquet file ({error})", file=name) from error


def _check_unpacked(metadata: Any, columns: Sequence[str], name: str) -> None:
    """Refuse a Parquet file if its metadata says that its columns, unpacked, are larger than a document may be."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    every = (group.column(number) for group in groups for number in range(group.num_columns))
    parts = [part for part in every if part.path_in_schema.partition(".")[0] in columns]
    if sum(part.total_uncompressed_size for part in parts) > _LARGEST:
        raise _too_large_error(name)
    values = sum(part.num_values for part in parts)
    if values > _MOST_VALUES:
        raise OSError(errno.EFBIG, f"it holds {values:,} values, and at most {_MOST_VALUES:,} are read", name)


def _check_decoded(batch: Any, name: str) -> None:
    """Refuse rows whose texts, repeated as often as the rows say, are larger than a document may be."""
    from pyarrow import compute, types

    repeated = [each for each in batch.columns if types.is_dictionary(each.type)]
    texts = [each for each in repeated if _is_text(each.type.value_type)]
    lengths = [
        compute.sum(compute.take(compute.binary_length(each.dictionary), each.indices)).as_py() for each in texts
    ]
    if sum(length or 0 for length in lengths) > _LARGEST:
        raise _too_large_error(name)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _too_large_error(name: str) -> OSError:
    return OSError(errno.EFBIG, f"larger than {format_size(_LARGEST)} when it is unpacked", name)

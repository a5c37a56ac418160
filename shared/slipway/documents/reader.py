"""Read the documents of a user's files within limits: plain texts and conversations.

The purpose of a text decides the error of one that cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from slipway.errors import ModelExportError, QuantizationError, ValidationError
from slipway.files.json_documents import parse_json
from slipway.files.regular_file import open_regular
from slipway.machine.bounded.process import BoundedProcess, Bounds, RefusedWorkError, UnboundedWorkError
from slipway.sizes import format_size

_REMEDY = 'give .txt files, or a JSON object with "text" or "messages" in each line of .jsonl files, in UTF-8'

MOST_TEXT = 32 << 20
"""Characters that are taken from all files together: far more text than a calibration or a comparison uses."""
LARGEST_LINE = 1 << 20
COLUMNS = ("text", "messages", "prompt", "completion")
"""Names of the values of a document."""
_READER = "slipway.documents.whole_files:rows"

Row = tuple[Any, str]
"""A text or a JSON value, with its file and line."""


class Purpose(StrEnum):
    """What a text is for."""

    CALIBRATION = "calibration"
    HELD_OUT = "heldout"
    OWN_TEXT = "own_text"


@dataclass(frozen=True, slots=True)
class _Fault:
    subject: str
    error: type[ModelExportError]
    reason: str


_FAULTS: Mapping[Purpose, _Fault] = {
    Purpose.CALIBRATION: _Fault("text for calibration", QuantizationError, "CALIBRATION_DATA_INVALID"),
    Purpose.HELD_OUT: _Fault("held-out text", ValidationError, "VALIDATION_IMPOSSIBLE"),
    Purpose.OWN_TEXT: _Fault("text beside the run", ValidationError, "VALIDATION_IMPOSSIBLE"),
}


def invalid_text_error(purpose: Purpose, what: str, remedy: str = "", **about: object) -> ModelExportError:
    """Return the error of text that cannot be used."""
    fault = _FAULTS[purpose]
    return fault.error(f"{fault.subject}: {what}", reason=fault.reason, remedy=remedy or _REMEDY, about=about)


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Attributes:
        where: File and line, for errors.
        text: A plain text; empty for a conversation.
        messages: The messages of a conversation, as a chat template takes them.
    """

    where: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def size(self) -> int:
        """Return the number of characters that it counts against a limit; no chat template is needed for it."""
        return len(self.text) + (len(str(self.messages)) if self.messages else 0)


def document_files(path: Path) -> list[Path]:
    """Return the files of text below a folder, sorted by name, or the file itself; none if there are none."""
    every = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [each for each in every if each.suffix.lower() in _READERS and not each.is_dir()]


def read_documents(path: Path, purpose: Purpose) -> Iterator[Document]:
    """Yield the documents of a folder or a file, file by file in order of name, the same share of MOST_TEXT from each.

    Raises:
        ModelExportError: A file or a line cannot be used, with the reason of the purpose.
    """
    files = document_files(path)
    for file in files:
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        yield from read_file(file, name, purpose, most=MOST_TEXT // len(files))


def read_file(path: Path, name: str, purpose: Purpose, *, most: int) -> Iterator[Document]:
    """Yield the documents of a file until their text has so many characters; cut a long text there.

    Args:
        path: The file; the ending of its name tells what it holds.
        name: Its name in errors.
        purpose: What the text is for, by which errors have their reason.
        most: Most characters.

    Raises:
        ModelExportError: As :func:`read_documents`.
    """
    with closing(read_rows(path, name, purpose)) as rows:
        while most > 0 and (row := next(rows, None)) is not None:
            document = document_of(*row, purpose)
            yield replace(document, text=document.text[:most])
            most -= document.size


def read_rows(path: Path, name: str, purpose: Purpose, *, columns: tuple[str, ...] = COLUMNS) -> Generator[Row]:
    """Yield what a file holds, row by row, whether or not it is a document; a plain text is one row. Close it to end its process.

    Args:
        path: The file; the ending of its name tells what it holds.
        name: Its name in errors.
        purpose: What the text is for, by which errors have their reason.
        columns: Names of the values to read from a file that is decoded whole.

    Raises:
        ModelExportError: The file cannot be read, with the reason of the purpose.
    """
    try:
        yield from _READERS[path.suffix.lower()](path, name, purpose, columns)
    except OSError as error:
        raise invalid_text_error(purpose, f"{name} cannot be read ({error.strerror or error})", file=name) from error


def _read_text(path: Path, name: str, purpose: Purpose, _columns: tuple[str, ...]) -> Iterator[Row]:
    with open_regular(path) as file:
        data = file.read(MOST_TEXT)
        whole = not file.read(1)
    yield _decode(data, name, purpose, whole=whole), name


def _decode(data: bytes, where: str, purpose: Purpose, *, whole: bool) -> str:
    end = len(data)
    if not whole:  # the cut may be inside a character
        end -= next((back for back in range(1, 5) if data[-back] & 0xC0 != 0x80), 0) if data else 0
    try:
        return data[:end].decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise invalid_text_error(purpose, f"{where} is not UTF-8 (byte {error.start})", file=where) from error


def _read_lines(path: Path, name: str, purpose: Purpose, _columns: tuple[str, ...]) -> Iterator[Row]:
    with open_regular(path) as file:
        for number, line in enumerate(_limited_lines(file, name, purpose), 1):
            if line.strip():
                where = f"{name}, line {number}"
                yield _parse_line(line, where, purpose), where


def _limited_lines(file: BinaryIO, name: str, purpose: Purpose) -> Iterator[bytes]:
    while line := file.readline(LARGEST_LINE + 1):
        if len(line) > LARGEST_LINE:
            raise invalid_text_error(purpose, f"{name} has a line of more than {format_size(LARGEST_LINE)}", file=name)
        yield line


def _parse_line(data: bytes, where: str, purpose: Purpose) -> Any:
    try:
        return parse_json(data.removeprefix(b"\xef\xbb\xbf"), lenient=True)
    except ValueError as error:
        raise invalid_text_error(purpose, f"{where} is not JSON ({error})", file=where) from error


def _read_whole(path: Path, name: str, purpose: Purpose, columns: tuple[str, ...]) -> Iterator[Row]:
    """Read a file that cannot be read in part, in a process with limits, because its decoded size is not known before."""
    parquet = path.suffix.lower() == ".parquet"
    if parquet and not find_spec("pyarrow"):
        remedy = "pip install pyarrow where the quantize and validate stages run, or save the data as .jsonl"
        raise invalid_text_error(purpose, f"{name} is a Parquet file, and pyarrow is not installed", remedy, file=name)
    imports = ("pyarrow.parquet", "pyarrow.compute") if parquet else ()
    with BoundedProcess(_READER, Bounds(seconds=60.0), imports=imports) as process:
        try:
            yield from process.items(str(path.absolute()), name, purpose.value, columns)
        except UnboundedWorkError as error:
            raise invalid_text_error(
                purpose, f"to decode {name} {error}", "give a smaller sample of the data", file=name
            ) from error
        except RefusedWorkError as error:
            raise invalid_text_error(purpose, f"{name} cannot be read ({error})", file=name) from error


def document_of(row: Any, where: str, purpose: Purpose) -> Document:
    """Return the document of one JSON value: an object with a text, a conversation, or a prompt and its completion."""
    if isinstance(row, str):
        return Document(where, text=row)
    if isinstance(row, dict):
        text, messages = row.get("text"), row.get("messages")
        if isinstance(text, str):
            return Document(where, text=text)
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return Document(where, messages=tuple(messages))
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            said = ({"role": "user", "content": prompt}, {"role": "assistant", "content": completion})
            return Document(where, text=f"{prompt}\n{completion}", messages=said)
        names = ", ".join(sorted(row)[:8]) or "nothing"
        fault = f'{where} has no "text", "messages", or "prompt" and "completion", but {names}'
        raise invalid_text_error(purpose, fault, file=where)
    raise invalid_text_error(purpose, f"{where} is not an object with a text or messages", file=where)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


_READERS: dict[str, Callable[[Path, str, Purpose, tuple[str, ...]], Iterator[Row]]] = {
    ".txt": _read_text,
    ".jsonl": _read_lines,
    ".json": _read_whole,
    ".parquet": _read_whole,
}
SUFFIXES = tuple(_READERS)
"""Endings of the names of files with text."""

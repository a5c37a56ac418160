"""Read the documents of a calibration from a user's files, within limits: plain texts and conversations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from slipway.errors import QuantizationError
from slipway.files.json_documents import parse_json
from slipway.files.regular_file import open_regular
from slipway.machine.bounded.process import BoundedProcess, Bounds, RefusedWorkError, UnboundedWorkError
from slipway.sizes import format_size

MOST_TEXT = 32 << 20
"""Characters that are taken from all files together, the same share from each: far more text than a calibration uses."""
LARGEST_LINE = 1 << 20
_READER = "slipway_quantize.calibration_data.whole_files:rows"


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


def read_documents(folder: Path) -> Iterator[Document]:
    """Yield the documents of a folder, file by file in order of name.

    Raises:
        QuantizationError: ``CALIBRATION_DATA_INVALID`` with the file and the line at fault.
    """
    readers = {".txt": _texts, ".jsonl": _lines, ".json": _whole, ".parquet": _whole}
    files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in readers]
    for path in files:
        name = path.relative_to(folder).as_posix()
        try:
            yield from _limited(readers[path.suffix.lower()](path, name), MOST_TEXT // len(files))
        except OSError as error:
            raise invalid(f"{name} cannot be read ({error.strerror or error})", file=name) from error


def _limited(documents: Iterator[Document], most: int) -> Iterator[Document]:
    """Yield documents until their text has so many characters; cut a long text there."""
    while most > 0 and (document := next(documents, None)) is not None:
        yield replace(document, text=document.text[:most])
        most -= len(document.text) + len(str(document.messages))


def invalid(what: str, remedy: str = "", **about: object) -> QuantizationError:
    """Return the error of text that cannot be used."""
    remedy = (
        remedy or 'give .txt files, or a JSON object with "text" or "messages" in each line of .jsonl files, in UTF-8'
    )
    return QuantizationError(
        f"text for calibration: {what}", reason="CALIBRATION_DATA_INVALID", remedy=remedy, about=about
    )


def _texts(path: Path, name: str) -> Iterator[Document]:
    with open_regular(path) as file:
        data = file.read(MOST_TEXT)
        whole = not file.read(1)
    yield Document(name, text=_decoded(data, name, whole=whole))


def _decoded(data: bytes, where: str, *, whole: bool = True) -> str:
    end = len(data)
    if not whole:  # the cut may be inside a character
        end -= next((back for back in range(1, 5) if data[-back] & 0xC0 != 0x80), 0) if data else 0
    try:
        return data[:end].decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise invalid(f"{where} is not UTF-8 (byte {error.start})", file=where) from error


def _lines(path: Path, name: str) -> Iterator[Document]:
    with open_regular(path) as file:
        for number, line in enumerate(_limited_lines(file, name), 1):
            if line.strip():
                where = f"{name}, line {number}"
                yield document_of(_parsed(line, where), where)


def _limited_lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    while line := file.readline(LARGEST_LINE + 1):
        if len(line) > LARGEST_LINE:
            raise invalid(f"{name} has a line of more than {format_size(LARGEST_LINE)}", file=name)
        yield line


def _parsed(data: bytes, where: str) -> Any:
    try:
        return parse_json(data.removeprefix(b"\xef\xbb\xbf"), lenient=True)
    except ValueError as error:
        raise invalid(f"{where} is not JSON ({error})", file=where) from error


def _whole(path: Path, name: str) -> Iterator[Document]:
    """Read a file that cannot be read in part: what it holds when it is decoded is known only then, so a process with limits does it."""
    parquet = path.suffix.lower() == ".parquet"
    if parquet and not find_spec("pyarrow"):
        remedy = "pip install pyarrow where the quantize stages run, or save the data as .jsonl"
        raise invalid(f"{name} is a Parquet file, and pyarrow is not installed", remedy, file=name)
    imports = ("pyarrow.parquet", "pyarrow.compute") if parquet else ()
    with BoundedProcess(_READER, Bounds(seconds=60.0), imports=imports) as process:
        try:
            for where, text, messages in process.items(str(path.absolute()), name):
                yield Document(where, text, tuple(messages))
        except UnboundedWorkError as error:
            raise invalid(f"to decode {name} {error}", "give a smaller sample of the data", file=name) from error
        except RefusedWorkError as error:
            raise invalid(f"{name} cannot be read ({error})", file=name) from error


def document_of(row: Any, where: str) -> Document:
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
        raise invalid(f'{where} has no "text", "messages", or "prompt" and "completion", but {names}', file=where)
    raise invalid(f"{where} is not an object with a text or messages", file=where)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)

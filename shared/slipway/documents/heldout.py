"""Choose the text for the comparison: the user's held-out text, or a built-in one that is part of every Python."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipway.documents.reader import Document, Purpose, document_files, invalid_text_error, read_file
from slipway.documents.rendering import Renderer, Writer
from slipway.texts import counted

BUILT_IN_TOPICS = ("assignment", "classes", "exceptions", "formatstrings", "import", "operator-summary", "yield")
BUILT_IN_MODULES = ("argparse", "json.decoder", "textwrap", "zipfile")
_BETWEEN = "\n\n"
MAX_CHARACTERS = 4_000_000
"""Text beyond this is not used: there are few windows, and tokenizing all of it would only take time."""


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """The text of a validation and its origin.

    Attributes:
        documents: The documents, in order.
        source: Description of its origin.
        files: Names of the files, in order.
        held_out: Whether the user gave it as held-out text.
    """

    documents: tuple[Document, ...]
    source: str
    files: tuple[str, ...]
    held_out: bool

    def write(self, path: Path) -> Path:
        """Write the documents to a file that :func:`read_written` reads, where the model's tokenizer is; return its path."""
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(each)) + "\n" for each in self.documents)
        return path


def read_held_out(path: Path) -> HeldOutText:
    """Read the documents of a folder or a file in order of name, up to MAX_CHARACTERS.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: there are none, or a file cannot be used.
    """
    names: list[str] = []
    documents: list[Document] = []
    room = MAX_CHARACTERS
    for file in document_files(path):
        if room > 0:
            names.append(file.relative_to(path).as_posix() if path.is_dir() else file.name)
            for document in read_file(file, names[-1], Purpose.HELD_OUT, most=room):
                documents.append(document)
                room -= document.size + len(_BETWEEN)
    if not any(document.messages or document.text.strip() for document in documents):
        remedy = "put text that the model was not trained on into .txt or .jsonl files there, or give no held-out text"
        raise invalid_text_error(Purpose.HELD_OUT, f"{path.name!r} has no file with text", remedy)
    return HeldOutText(tuple(documents), f"held-out text, {counted(len(names), 'file')}", tuple(names), held_out=True)


def read_written(path: Path) -> Iterator[Document]:
    """Yield the documents that :meth:`HeldOutText.write` wrote."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            record: dict[str, Any] = json.loads(line)
            yield Document(record["where"], record["text"], tuple(record["messages"]))


def render(documents: Iterable[Document], tokenizer: Any) -> str:
    """Write documents as one text, with conversations as the model reads them; a tokenizer of None has no template.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the chat template refuses a conversation, or there is none.
    """
    with Renderer(tokenizer, Purpose.HELD_OUT) as renderer:
        return join_documents(documents, renderer)


def join_documents(documents: Iterable[Document], writer: Writer) -> str:
    """Return documents as one text, joined by blank lines."""
    return _BETWEEN.join(map(writer.text, documents))


def documentation() -> dict[str, str]:
    """Return Python's documentation by topic; empty for a Python without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return topics


def built_in_text() -> HeldOutText:
    """Return English from Python's documentation topics and code from its standard library: the same for a given Python."""
    topics = documentation()
    documents = [
        Document(f"pydoc_data.topics[{name!r}]", text=topics[name]) for name in BUILT_IN_TOPICS if name in topics
    ]
    for module in BUILT_IN_MODULES:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin and Path(spec.origin).is_file():
            documents.append(Document(module, text=Path(spec.origin).read_text(encoding="utf-8")))
    source = (
        "built-in text (Python's documentation topics and standard library sources), because no held-out text was "
        "given: the model may have been trained on it, so its perplexity does not measure quality"
    )
    return HeldOutText(tuple(documents), source, tuple(each.where for each in documents), held_out=False)

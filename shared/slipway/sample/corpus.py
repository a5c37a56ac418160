"""The sample's texts, which all come with Python: documentation topics and sources of the standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipway.errors import ModelExportError

# Pure Python modules that every CPython since 3.11 has as one file of this name.
ADAPTER_MODULES = (
    "argparse.py",
    "ast.py",
    "collections/__init__.py",
    "dataclasses.py",
    "difflib.py",
    "enum.py",
    "fractions.py",
    "functools.py",
    "gettext.py",
    "http/client.py",
    "inspect.py",
    "ipaddress.py",
    "logging/__init__.py",
    "mailbox.py",
    "optparse.py",
    "pickle.py",
    "random.py",
    "shutil.py",
    "smtplib.py",
    "socket.py",
    "statistics.py",
    "subprocess.py",
    "tarfile.py",
    "threading.py",
    "tokenize.py",
    "typing.py",
    "urllib/request.py",
    "weakref.py",
)
HELDOUT_MODULES = ("configparser.py", "csv.py", "queue.py", "textwrap.py")

# Every n-th topic is kept from the base model's training, to measure it on.
_HELDOUT_TOPIC_STEP = 12


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents to train on and documents never trained on, in a fixed order."""

    training: tuple[str, ...]
    heldout: tuple[str, ...]


def documentation() -> Corpus:
    """Return English text: the topics of this Python's ``help()``.

    Raises:
        ModelExportError: reason ``FILE_ERROR`` if this Python was installed without ``pydoc_data``.
    """
    by_name = topics()
    texts = [by_name[name] for name in sorted(by_name)]
    heldout = texts[::_HELDOUT_TOPIC_STEP]
    training = [text for index, text in enumerate(texts) if index % _HELDOUT_TOPIC_STEP]
    return Corpus(training=tuple(training), heldout=tuple(heldout))


def topics() -> Mapping[str, str]:
    """Return the topics of this Python's ``help()`` by their names.

    Raises:
        ModelExportError: reason ``FILE_ERROR`` if this Python was installed without ``pydoc_data``.
    """
    try:
        from pydoc_data.topics import topics as texts
    except ImportError as error:
        raise ModelExportError(
            "this Python has no pydoc_data.topics, the text that the sample learns",
            reason="FILE_ERROR",
            remedy="install the complete standard library (Debian: libpython3-stdlib)",
            about={"file": "pydoc_data/topics.py"},
        ) from error
    return texts


def python_sources(folder: Path | None = None) -> Corpus:
    """Return Python text: sources of standard library modules.

    Args:
        folder: The standard library's folder; this Python's by default.

    Raises:
        ModelExportError: reason ``FILE_ERROR`` if a module's source is missing.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    return Corpus(
        training=tuple(_source(folder, name) for name in ADAPTER_MODULES),
        heldout=tuple(_source(folder, name) for name in HELDOUT_MODULES),
    )


def _source(folder: Path, name: str) -> str:
    path = folder / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelExportError(
            f"cannot read {path}, a text the sample's adapter is trained on: {error.strerror}",
            reason="FILE_ERROR",
            remedy="use a Python whose standard library is installed as source files",
            about={"file": path},
        ) from error

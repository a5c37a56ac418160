"""Recognise failures for lack of memory, a GPU's too, or disk space, and report a full disk with the same error everywhere.

Lack of memory shows in many ways.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipway.errors import ModelExportError, StageError
from slipway.sizes import format_size

MEMORY_REMEDY = "free memory, run it with fewer threads, or use a machine with more"
_MEMORY_WORDS = re.compile(
    r"out of memory|not enough memory|can't allocate memory|cannot allocate memory|failed to allocate memory"
    r"|failed to map segment|memory allocation (?:still )?failed|can't start new thread|failed to start \w+ thread|bad_alloc|OutOfMemory|MemoryError",
    re.IGNORECASE,
)
# As PyTorch, ONNX Runtime, TensorRT and CUDA's libraries word it. ONNX Runtime says the same of its arena on a GPU and in main memory.
_GPU_MEMORY_WORDS = re.compile(
    r"\bcuda\b[^\n.,;]{0,80}\bout of memory|Error Code 2: OutOfMemory|requested amount of GPU memory|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY|\bCU[A-Z]+_STATUS_ALLOC_FAILED|CUDA initialization failure with error: 2\b",
    re.IGNORECASE,
)
_BASE_BYTES, _CORE_BYTES, _MOST_CORES = 1 << 30, 256 << 20, 16


@dataclass(frozen=True, slots=True)
class Shortage:
    """Too little of one kind of memory.

    Attributes:
        reason: The stable reason of the failure.
        of: What ran out, in words.
        remedy: What helps.
    """

    reason: str
    of: str
    remedy: str


MEMORY = Shortage("OUT_OF_MEMORY", "memory", MEMORY_REMEDY)
GPU_MEMORY = Shortage(
    "GPU_OUT_OF_MEMORY",
    "the GPU's memory",
    "end other programs that use the GPU (nvidia-smi lists them), or use a GPU with more memory",
)

DISK_REMEDY = "free space there, or work on another disk"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception, or one of its causes, is about memory of any kind, judged by type and message."""
    return memory_shortage(error) is not None


def memory_shortage(error: BaseException) -> Shortage | None:
    """Return the kind of memory that an exception, or one of its causes, is about, judged by type and message."""
    links = with_causes(error)
    found = memory_shortage_in("\n".join(f"{type(link).__name__}: {link}" for link in links))
    if found is None and any(
        isinstance(link, MemoryError) or (isinstance(link, OSError) and link.errno == errno.ENOMEM) for link in links
    ):
        return MEMORY
    return found


def with_causes(error: BaseException) -> list[BaseException]:
    """Return an exception and its causes, outermost first."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    return links


def memory_shortage_in(text: str) -> Shortage | None:
    """Return the kind of memory that a message is about. One about threads, whose stacks need memory, is about the machine's."""
    if _GPU_MEMORY_WORDS.search(text):
        return GPU_MEMORY
    return MEMORY if _MEMORY_WORDS.search(text) else None


def address_space_limit() -> int | None:
    """Return the limit of address space of this process and its children (``ulimit -v``) in bytes; None if unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def check_address_space() -> None:
    """Check that an embedded coordinator fits into the address space: otherwise libraries end the process silently.

    It needed 1.3 GB with two cores, nearly all of it reserved for threads and never used.

    Raises:
        StageError: ``OUT_OF_MEMORY``.
    """
    limit = address_space_limit()
    needed = _BASE_BYTES + _CORE_BYTES * min(os.cpu_count() or 1, _MOST_CORES)
    if limit is not None and limit < needed:
        raise StageError(
            f"address space is limited to {format_size(limit)}, and running an export here needs {format_size(needed)}",
            reason="OUT_OF_MEMORY",
            remedy="raise the limit (ulimit -v), or let a coordinator run it: --coordinator HOST:PORT",
        )


def is_disk_full(error: BaseException) -> bool:
    """Return whether the operating system refused to write for lack of space or quota."""
    return isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def translate_disk_full(
    kind: type[ModelExportError], doing: str, *, at: Path, remedy: str = DISK_REMEDY
) -> Iterator[None]:
    """Translate the operating system's "no space left" into the error that users and recovery rules know.

    Args:
        kind: Class of the error.
        doing: Purpose of the space, such as ``for the merged model``.
        at: Folder that was written to.
        remedy: Remedy of the error.

    Raises:
        ModelExportError: Of the class ``kind``, reason ``DISK_FULL``.
    """
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise kind(f"no space left at {at} {doing}", reason="DISK_FULL", remedy=remedy, about={"folder": at}) from error

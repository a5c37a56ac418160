"""Find the places where a trace of TorchScript's tracer depends on its sample, by the warnings of the tracer."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Modules of transformers that branch on tensor values, but only on whether the cache is empty or a mask may be left out.
# Neither varies between calls of a decoder with cache and mask, and a comparison at other shapes covers both.
HARMLESS = ("cache_utils.py", "masking_utils.py", "sdpa_attention.py")

MASKING, BOOLEAN, CONSTANT = "masking", "python boolean", "constant"


@dataclass(frozen=True, slots=True)
class Branch:
    """A place where a trace depends on its sample.

    Attributes:
        kind: ``masking`` (code of attention masks), ``python boolean`` (a branch on a value) or ``constant`` (a value that the trace
            fixes).
        path: The Python file.
        line: Number of the line.
        code: The line.
        message: What the tracer says.
    """

    kind: str
    path: Path
    line: int
    code: str
    message: str

    @property
    def file(self) -> str:
        """Return the name of the file."""
        return self.path.name

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code} ({self.kind})"


def harmful_branches(caught: Iterable[warnings.WarningMessage]) -> list[Branch]:
    """Return the places that the tracer warns of and that are not known to be harmless, each once."""
    from torch.jit._trace import TracerWarning  # torch is loaded where a model is traced

    branches: dict[tuple[str, int], Branch] = {}
    for warning in caught:
        place = Path(warning.filename)
        known = place.name in HARMLESS and "transformers" in place.parts
        if issubclass(warning.category, TracerWarning) and not known and not _only_guards(warning):
            branches.setdefault((warning.filename, warning.lineno), _branch(warning))
    return list(branches.values())


def _branch(warning: warnings.WarningMessage) -> Branch:
    message = str(warning.message).splitlines()[0]
    code = linecache.getline(warning.filename, warning.lineno).strip()
    if "mask" in code.lower() or "mask" in Path(warning.filename).name:
        kind = MASKING
    elif "Python boolean" in message:
        kind = BOOLEAN
    else:
        kind = CONSTANT
    return Branch(kind, Path(warning.filename), warning.lineno, code, message)


def _only_guards(warning: warnings.WarningMessage) -> bool:
    """Return whether the branch is an assertion, also one of torch (``torch._check``), or only raises: then it decides only whether to continue."""
    line, after = (linecache.getline(warning.filename, warning.lineno + step).strip() for step in (0, 1))
    return line.startswith(("assert ", "_check_with(")) or (
        line.startswith("if ") and line.endswith(":") and after.startswith("raise ")
    )

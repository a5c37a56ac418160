"""Files that tell when Python runs them: what a checkpoint could hold to have its code run."""

from __future__ import annotations

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

_TRAP = """\
import builtins
with builtins.open({record!r}, "a") as file:
    file.write(__name__ + "\\n")
raise SystemExit("code in a checkpoint ran: " + __name__)
"""


class Traps:
    """Modules in a folder, of every name that a program may import; each writes its name down and ends the process.

    Args:
        folder: Where they lie.
        record: File that names those which ran; elsewhere.
    """

    def __init__(self, folder: Path, record: Path) -> None:
        self._record = record
        for name in sorted(_names()):
            (folder / f"{name}.py").write_text(_TRAP.format(record=str(record)))

    def ran(self) -> list[str]:
        """Names of those that ran."""
        return self._record.read_text().split() if self._record.exists() else []


def _names() -> set[str]:
    """Names of the standard library, of what is installed, of Slipway's own packages, and what Python imports by itself."""
    installed = {name for name in packages_distributions() if name.isidentifier()}
    own = {"slipway", "slipway_protos", "slipway_merge", "slipway_validate", "slipway_coordinator"}
    return {*sys.stdlib_module_names, *installed, *own, "sitecustomize", "usercustomize", "support"}

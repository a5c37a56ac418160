"""Files that record when Python runs them, as a hostile checkpoint may contain to get its code run."""

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
        folder: Folder of the modules.
        record: File outside the folder in which modules that ran write their names.
    """

    def __init__(self, folder: Path, record: Path) -> None:
        self._record = record
        for name in sorted(_names()):
            (folder / f"{name}.py").write_text(_TRAP.format(record=str(record)))

    def ran(self) -> list[str]:
        """Return the names of the modules that ran."""
        return self._record.read_text().split() if self._record.exists() else []


def _names() -> set[str]:
    """Return module names of the standard library, installed packages and Slipway, and those that Python imports by itself."""
    installed = {name for name in packages_distributions() if name.isidentifier()}
    own = {"slipway", "slipway_protos", "slipway_merge", "slipway_validate", "slipway_coordinator"}
    return {*sys.stdlib_module_names, *installed, *own, "sitecustomize", "usercustomize", "support"}

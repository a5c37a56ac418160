"""Write a ``sitecustomize`` that changes a library's module right after its import, in every process with the folder in its PYTHONPATH.

Stages run in child processes that get only named variables; PYTHONPATH is one of them, so that the fault is in the process where the
real engine runs.
"""

from __future__ import annotations

import os
from pathlib import Path

_HOOK = """
import importlib.abc
import importlib.util
import sys

CHANGES = {changes!r}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in CHANGES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_and_change(module):
            execute(module)
            exec(CHANGES[name], module.__dict__)

        spec.loader.exec_module = exec_and_change
        return spec


sys.meta_path.insert(0, _Finder())
"""


def seeded(folder: Path, changes: dict[str, str]) -> str:
    """Return the PYTHONPATH with which code is run at the end of modules, by name of the module."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_HOOK.format(changes=changes))
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])

"""The client of the examples of pipelines as a module."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from support.commands.platforms import EXAMPLES

FILE = EXAMPLES / "slipway_http.py"


def load_client() -> Any:
    """Import ``slipway_http.py`` from its file; it is no module of the product."""
    spec = importlib.util.spec_from_file_location("slipway_http", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    del sys.modules[spec.name]
    return module

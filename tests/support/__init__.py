"""Support for tests: servers, models, stages, and ways to run the product as its users do. See the README beside this file."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TINY_STAGES = SUPPORT / "tiny_stages"
"""Folder that is first on the Python path of processes whose stages do almost nothing."""
TINY_ENGINE = SUPPORT / "tiny_engine"
"""Folder on the Python path of processes that find the engine ``processes``."""

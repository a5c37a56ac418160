"""Write small distributions with entry points, as an installer leaves them in a folder of the import path."""

from __future__ import annotations

from pathlib import Path


def install_format(site: Path, distribution: str, *, name: str, module: str, code: str) -> None:
    """Write a distribution that provides ``module:FORMAT`` as the format ``name``; ``code`` is the module."""
    metadata = site / f"{distribution}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[slipway.formats]\n{name} = {module}:FORMAT\n")
    (site / f"{module}.py").write_text(code)

"""The notebook runs in Jupyter's own kernel, from its first cell to its last."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from support.models.tiny_models import make_base, make_checkpoint

NOTEBOOK = Path(__file__).parents[2] / "examples" / "export.ipynb"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notebook")
    make_base(folder / "base")
    make_checkpoint(folder / "base", folder / "run")
    return folder


def executed(sources: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **parameters: Any) -> Any:
    """Run the notebook with these values in place of those of the cell that is tagged ``parameters``."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    given = {"RUN": str(sources / "run"), "BASE": str(sources / "base"), "OUT": str(folder / "out"), **parameters}
    cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in given.items())
    monkeypatch.setenv("SLIPWAY_HOME", str(folder / "home"))
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
    with ThreadPoolExecutor(1) as pool:  # in the main thread it would change how signals are handled
        return pool.submit(lambda: asyncio.run(client.async_execute())).result()


def shown(notebook: Any, kind: str) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


@pytest.mark.slow
def test_the_notebook_runs(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"validation.test_samples": 2, "validation.effort": "quick"}
    done = executed(sources, tmp_path, monkeypatch, FORMATS=["pytorch"], SETTINGS=settings)
    pages = "".join(shown(done, "text/html"))
    assert "preflight" in pages
    assert "<iframe sandbox" in pages, "the result does not show its report"
    printed = "".join(output.get("text", "") for cell in done.cells for output in cell.get("outputs", ()))
    assert "pytorch: passed" in printed
    assert (tmp_path / "out").is_dir()


def test_what_is_impossible_ends_the_notebook_where_it_is_said(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CellExecutionError) as caught:
        executed(sources, tmp_path, monkeypatch, BASE=str(tmp_path / "nothing"))
    assert "local Hugging Face cache" in str(caught.value)
    assert "plan.require()" in str(caught.value)


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]

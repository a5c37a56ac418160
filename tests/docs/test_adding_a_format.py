"""The documented format is installed as documented, and is one."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support.commands.cli import Done, slipway
from support.models import tiny_models

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-format.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distribution that the page describes, a base and a run."""
    text, site = PAGE.read_text(encoding="utf-8"), tmp_path_factory.mktemp("site")
    stage, module = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (site / "npz_format").mkdir()
    (site / "npz_format" / "__init__.py").touch()
    (site / "npz_format" / "stage.py").write_text(stage)
    (site / "npz_format" / "format.py").write_text(module)
    (site / "npz_format" / "usage.example.j2").write_text(re.findall(r"```jinja\n(.*?)```", text, re.DOTALL)[0])
    metadata = site / "npz_format-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: npz-format\nVersion: 1.0\n")
    points = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0].replace('project.entry-points."', "").replace('"', "")
    (metadata / "entry_points.txt").write_text(points)
    tiny_models.make_base(site / "base")
    tiny_models.make_checkpoint(site / "base", site / "run")
    return site


def run(site: Path, *words: str | Path) -> Done:
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return slipway(*words, home=site / "home", PYTHONPATH=path, EXPORT_ENABLE_NPZ="true", EXPORT_NPZ_COMPRESS="true")


def test_the_documented_format_is_planned_listed_and_delivered(site: Path) -> None:
    only = [word for name in ("pytorch", "onnx") for word in ("--set", f"formats.{name}.enabled=false")]
    where = ("--base-model", site / "base", "--checkpoint", site / "run", "--set", "validation.enabled=false", *only)
    planned = run(site, "export", "--plan", "--json", *where)
    assert planned.code == 0, planned.err
    assert [task["id"] for task in planned.json["tasks"]] == ["merge", "npz_pack"]
    assert planned.json["preflight"]["task_bytes"]["npz_pack"] > 0
    assert "npz" in {each["name"] for each in run(site, "doctor", "--json").json["formats"]}
    done = run(site, "export", "--json", *where, "--out", site / "out")
    assert done.code == 0, done.err
    assert (Path(done.json["paths"]["npz"]) / "weights.npz").is_file()
    assert "print(len(np.load" in (Path(done.json["output_directory"]) / "README.md").read_text()

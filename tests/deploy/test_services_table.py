"""One table says what other files say of services: a format is one folder, one row, and its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from support.commands.cli import slipway
from support.models import tiny_models

ROOT = Path(__file__).parents[2]
PARTS = ("deploy", "k8s", "docs/site", "docs/installing.md", "docs/architecture.md", "pyproject.toml")
SOURCE = ROOT / "tests" / "support" / "npz_format" / "npz_format"
ROW = """
[npz]
does = "PyTorch → one numpy archive"
runs_on = "CPU"
stages = {npz_pack = "stage:STAGE"}
formats = {npz = "format:FORMAT"}
requires = ["numpy>=2", "slipway-ml[worker]"]
worker = {for = "A format's stage.", cpu = 2, memory = "8Gi", volume = "64Gi"}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the generator reads and writes."""
    root = tmp_path / "tree"
    for part in PARTS:
        target = root / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, target, ignore=shutil.ignore_patterns(".env"))
        else:
            shutil.copy(ROOT / part, target)
    kept = shutil.ignore_patterns("__pycache__", "*.so")
    for package in (ROOT / "services").glob("*/slipway_*"):
        shutil.copytree(package, root / package.relative_to(ROOT), ignore=kept)
    for page in (ROOT / "services").glob("*/README.md"):
        shutil.copy(page, root / page.relative_to(ROOT))
    for name in ("generate.py", "table.py", "services.toml"):
        shutil.copy(ROOT / "services" / name, root / "services" / name)
    return root


def generate(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(root / "services" / "generate.py"), *words, str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def add_format(root: Path) -> None:
    """Add a folder and a row, and nothing else."""
    package = root / "services" / "npz" / "slipway_npz"
    package.parent.mkdir()
    (package.parent / "README.md").write_text("# npz\n")
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in package.glob("*.py"):
        path.write_text(path.read_text().replace("npz_format", "slipway_npz"))
    table = root / "services" / "services.toml"
    table.write_text(table.read_text() + ROW)


def test_what_is_committed_is_current(tree: Path) -> None:
    assert generate(tree, "--check").returncode == 0


def test_a_format_is_one_folder_and_one_row(tree: Path) -> None:
    add_format(tree)
    stale = generate(tree, "--check")
    assert stale.returncode == 1
    assert "deploy/build.sh is not current: run python services/generate.py" in stale.stderr
    assert generate(tree).returncode == 0, stale.stderr
    assert generate(tree, "--check").returncode == 0

    images = subprocess.run([tree / "deploy" / "build.sh", "--list"], capture_output=True, text=True).stdout
    assert "npz cpu npz,s3" in images.splitlines()
    compose = yaml.safe_load((tree / "deploy" / "compose.yaml").read_text())["services"]
    assert "--stage=npz_pack" in compose["worker-npz"]["command"]
    assert "worker-npz" in (tree / "deploy" / "prometheus" / "prometheus.yaml").read_text()
    base = yaml.safe_load((tree / "k8s" / "base" / "kustomization.yaml").read_text())
    assert "npz" in base["resources"]
    worker = yaml.safe_load((tree / "k8s" / "base" / "npz" / "kustomization.yaml").read_text())
    assert worker["images"] == [{"name": "slipway-worker", "newName": "slipway-npz"}]
    changes = yaml.safe_load(worker["patches"][0]["patch"])
    assert [change["value"] for change in changes] == ["--stage=npz_pack", "2", "8Gi", "8Gi", "64Gi"]
    chart = yaml.safe_load((tree / "k8s" / "helm" / "slipway" / "files" / "workers.yaml").read_text())
    sizes = {"cpu": "2", "reserved": "8Gi", "memory": "8Gi", "volume": "64Gi", "cache": "32GiB"}
    assert chart["npz"] == {"stages": "npz_pack", "cuda": False, "replicas": 0, **sizes}
    assert "| `npz` | npz_pack | 0 |" in (tree / "k8s" / "helm" / "slipway" / "README.md").read_text()
    scaled = yaml.safe_load_all((tree / "k8s" / "components" / "keda" / "scaled-objects.yaml").read_text())
    assert "slipway-npz" in {each["metadata"]["name"] for each in scaled}
    page = (tree / "docs" / "architecture.md").read_text()
    assert "| [npz](../services/npz/README.md) | PyTorch → one numpy archive | CPU |" in page
    assert "services/npz/README.md" in (tree / "docs" / "site" / "mkdocs.yml").read_text()


def test_the_command_knows_a_format_by_its_folder_and_its_row(tree: Path, tmp_path: Path) -> None:
    add_format(tree)
    assert generate(tree).returncode == 0
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["npz"] == ["numpy>=2", "slipway-ml[worker]"]
    assert ",npz," in project["optional-dependencies"]["all"][0]
    # What installing the tree writes of these entry points.
    installed = tree / "services" / "npz" / "npz-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: npz\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in points.items() if "slipway_npz" in place)
            for group, points in project["entry-points"].items()
        )
    )
    path = os.pathsep.join([str(installed.parent), os.environ.get("PYTHONPATH", "")])
    doctor = slipway("doctor", "--json", home=tmp_path / "home", PYTHONPATH=path)
    assert "npz_pack" in {stage["name"] for stage in doctor.json["stages"]}
    assert "npz" in {made["name"] for made in doctor.json["formats"]}
    tiny_models.make_base(tmp_path / "base")
    tiny_models.make_checkpoint(tmp_path / "base", tmp_path / "run")
    where = ("--base-model", tmp_path / "base", "--checkpoint", tmp_path / "run")
    plan = slipway("export", *where, "-f", "npz", "--plan", "--json", home=tmp_path / "home", PYTHONPATH=path)
    assert "npz_pack" in {task["id"] for task in plan.json["tasks"]}, plan.err


def test_what_is_no_longer_in_the_table_goes(tree: Path) -> None:
    add_format(tree)
    assert generate(tree).returncode == 0
    table = tree / "services" / "services.toml"
    table.write_text(table.read_text().replace(ROW, ""))
    stale = generate(tree, "--check")
    assert "k8s/base/npz/kustomization.yaml is not current" in stale.stderr
    assert generate(tree).returncode == 0
    assert not (tree / "k8s" / "base" / "npz").exists()
    assert "npz" not in (tree / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[gguf]", "[Gguf]", "[Gguf] name: String should match pattern"),
        ("[gguf]", "[ggml]", "[ggml] has no package: make services/ggml/slipway_ggml/"),
        ('"lora.stage:STAGE"', '"lora.stages:STAGE"', "slipway_gguf has no module lora.stages"),
        ('"lora.stage:STAGE"', '"lora.stage:STAGES"', "[gguf] names lora.stage:STAGES, and its module has no STAGES"),
        ('"lora.stage:STAGE"', '"lora.stage"', "[gguf] stages.gguf_adapter: String should match pattern"),
        ('gguf_adapter = "lora', 'openvino = "lora', "[openvino] stages: [gguf] has openvino too"),
        ('does = "PyTorch → GGUF', 'dose = "PyTorch → GGUF', "[gguf] does: Field required"),
        ('does = "PyTorch → GGUF', 'brings = "a\\nb"\ndoes = "PyTorch → GGUF', "[gguf] brings: String should match pattern"),
        ('unserved = ["convert"]', 'unserved = ["converts"]', "[prepare] worker.unserved: converts is none of its stages"),
        ('cpu = 2, memory = "8Gi", reserved', 'cpu = "2", memory = "8Gi", reserved', "[prepare] worker.cpu: Input should be a valid integer"),
        ('memory = "8Gi", reserved = "4Gi"', 'memory = "8Gi", reserved = "4G"', "[prepare] worker.reserved: String should match pattern"),
        ('memory = "8Gi", reserved = "4Gi"', 'memory = "8Gi", reserved = "9Gi"', "[prepare] worker: Value error, reserved is 9Gi, more than memory: 8Gi"),
        ("replicas = 1", "replicas = -1", "[merge] worker.replicas: Input should be greater than or equal to 0"),
        ("[gguf]", "[gguf", "services/services.toml is not TOML"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(tree: Path, old: str, new: str, said: str) -> None:
    table = tree / "services" / "services.toml"
    assert old in table.read_text()
    table.write_text(table.read_text().replace(old, new, 1))
    before = (tree / "pyproject.toml").read_text()
    done = generate(tree)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert (tree / "pyproject.toml").read_text() == before


def test_requirements_may_hold_quotes(tree: Path) -> None:
    table = tree / "services" / "services.toml"
    marked = 'gguf>=0.19; python_version < \\"3.14\\"'
    table.write_text(table.read_text().replace('    "gguf>=0.19",', f'    "{marked}",', 1))
    assert generate(tree).returncode == 0
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    assert 'gguf>=0.19; python_version < "3.14"' in project["optional-dependencies"]["gguf"]


def test_a_service_without_a_page_is_named(tree: Path) -> None:
    (tree / "services" / "gguf" / "README.md").unlink()
    assert "[gguf] has no page: write services/gguf/README.md" in generate(tree).stderr


def test_a_file_without_the_place_is_named(tree: Path) -> None:
    page = tree / "docs" / "architecture.md"
    page.write_text(page.read_text().replace("<!-- end services -->", ""))
    done = generate(tree)
    assert done.returncode == 1
    assert "docs/architecture.md has no place for services" in done.stderr

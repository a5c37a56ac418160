"""Run third-party checkers of manifests; tests/k8s/tools/tools.sh installs them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from support.manifests.overlay import ROOT, Object

TOOLS = ROOT / ".k8s-tools"
EXCEPTIONS = ROOT / "tests" / "k8s" / "checkov.yaml"
_CHECKOV = TOOLS / "checkov" / "bin" / "checkov"
_MODULES = TOOLS / "npm" / "node_modules"
_COMPILER = _MODULES / "typescript" / "bin" / "tsc"
_PACKAGES = {"keda.sh": "keda", "cert-manager.io": "cert-manager", "gateway.networking.k8s.io": "gateway-api"}

needs_checkov = pytest.mark.skipif(not _CHECKOV.exists(), reason="checkov is not installed: make test-k8s does")
needs_schemas = pytest.mark.skipif(
    not _COMPILER.exists() or shutil.which("node") is None, reason="npm's schemas are not installed: make test-k8s does"
)

# Each object is made of the class of its kind, which checks values against the schema of its custom resource.
_CHECK_VALUES = """
import { readFileSync } from "node:fs";
for (const { number, file, kind, object } of JSON.parse(readFileSync(0))) {
  try {
    const model = (await import(file))[kind];
    if (model === undefined) throw new Error(`there is no kind ${kind}`);
    new model(object).validate();
  } catch (error) {
    console.log(`${number}: ${error.message}`);
  }
}
"""
_OPTIONS = [
    "--noEmit",
    "--strict",
    "--skipLibCheck",
    "--module",
    "esnext",
    "--target",
    "esnext",
    "--moduleResolution",
    "bundler",
]


def has_schema(thing: Object) -> bool:
    """Return whether npm has a schema for an object's kind."""
    return thing["apiVersion"].partition("/")[0] in _PACKAGES


def schema_problems(things: Sequence[Object], folder: Path) -> list[str]:
    """Return what the schemas of custom resources refuse: wrong values and unknown fields.

    Schemas alone let unknown fields pass, as the API server drops them silently; the same schemas as types do not.

    Args:
        things: Objects for which :func:`has_schema`.
        folder: An empty folder.
    """
    given = [
        {"number": number, "file": str(_schema(thing)), "kind": thing["kind"], "object": thing}
        for number, thing in enumerate(things)
    ]
    command = ["node", "--input-type=module", "--eval", _CHECK_VALUES]
    values = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True).stdout
    lines = []
    for number, thing in enumerate(things):
        lines.append(f'import type {{ I{thing["kind"]} as T{number} }} from "{_schema(thing)}";')
        lines.append(f"export const o{number}: T{number} = {json.dumps(thing)};")
    source = folder / "objects.ts"
    source.write_text("\n".join(lines))
    compiled = subprocess.run(
        ["node", str(_COMPILER), *_OPTIONS, str(source)], capture_output=True, text=True, cwd=folder
    )
    return [*values.splitlines(), *(line for line in compiled.stdout.splitlines() if "error" in line)]


def checkov_complaints(things: Sequence[Object], folder: Path) -> dict[str, list[str]]:
    """Return all of checkov's complaints, without its exceptions: the objects by check.

    Args:
        things: All objects of a cluster.
        folder: An empty folder.
    """
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump_all(things))
    options = ["--framework", "kubernetes", "--skip-download", "--compact", "--output", "json"]
    command = [str(_CHECKOV), *options, "--file", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    found = json.loads(done.stdout)
    assert found["summary"]["parsing_errors"] == 0
    assert found["summary"]["passed"] > len(things)
    complaints: dict[str, list[str]] = {}
    for failed in found["results"]["failed_checks"]:
        complaints.setdefault(failed["check_id"], []).append(failed["resource"])
    return complaints


def exceptions() -> set[str]:
    """Return the checks that checkov's configuration skips."""
    return set(yaml.safe_load(EXCEPTIONS.read_text())["skip-check"])


def _schema(thing: Object) -> Path:
    group, _, version = thing["apiVersion"].partition("/")
    return _MODULES / "@kubernetes-models" / _PACKAGES[group] / group / version / f"{thing['kind']}.js"

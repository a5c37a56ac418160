"""Nothing that people copy, and nothing that Slipway starts, lets Python import from the current folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = ("*.md", "*.sh", "*.yaml", "*.yml", "*.cfg", "Makefile", "Dockerfile*", "*.py", "*.j2", "run")
CALL = re.compile(
    r"\bpython(?:3(?:\.\d+)?)?((?:\s+-(?!-)\w*(?<![mc]))*)\s+-([mc])\b|\bpython3?((?:\s+-\w+)*)\s+-(?=\s)"
)
"""``python -m``, ``python -c`` and ``python -``, with the options before: all three begin to search where they are started."""


FOLDERS = ("shared", "services", "protos", "docs", "deploy", "k8s", "examples", ".ci")


def files(*patterns: str) -> list[Path]:
    """Files of the repository; of the tests, whose Python runs in folders of its own, the shell scripts alone."""
    found = {path for folder in FOLDERS for pattern in patterns for path in (ROOT / folder).rglob(pattern)}
    found |= {path for pattern in patterns for path in (ROOT / "tests").rglob(pattern) if path.suffix == ".sh"}
    found |= {path for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(path for path in found if path.is_file())


def unsafe(text: str) -> list[str]:
    """Calls of Python that would import from the current folder."""
    words = re.sub(r"\n\s*-\s+(?=-)", " ", text)  # a list of YAML, one word a line
    words = re.sub(r"\$[({]PYTHON[^)}]*[)}]", "python", words)
    words = re.sub(r"[\"'\[\],`]|\$\(BIN\)/", " ", words)
    return [found[0] for found in CALL.finditer(words) if not {"-P", "-I"} & set((found[1] or found[3] or "").split())]


@pytest.mark.parametrize(
    ("text", "is_safe"),
    [
        ("$ python -m slipway.security --name ci", False),
        ("command: [python, -m, slipway.worker]", False),
        ('CMD ["/opt/slipway/bin/python3", "-m", "slipway.worker"]', False),
        ("command:\n  - python\n  - -m\n  - slipway.worker", False),
        ("python3.11 -u -m x", False),
        ("python3 -c 'import json'", False),
        ("docker run image python - merge < check.py", False),
        ('"${PYTHON:-python3}" -m venv tools', False),
        ("$(PYTHON) -m venv tools", False),
        ("python -P -m slipway.worker", True),
        ("python3 -u -P -m slipway.worker", True),
        ("python3 -I -c 'import json'", True),
        ("python docs/generate_reasons.py", True),
        ("python example.py -m x", True),
    ],
)
def test_what_is_unsafe_is_known(text: str, is_safe: bool) -> None:
    assert (unsafe(text) == []) == is_safe


def test_documents_images_and_manifests_name_no_unsafe_call() -> None:
    walked = files(*SHOWN)
    assert len(walked) > 300
    assert ROOT / "tests" / "k8s" / "tools" / "tools.sh" in walked
    found = {str(path.relative_to(ROOT)): unsafe(path.read_text(encoding="utf-8")) for path in walked}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_images_keep_python_from_the_current_folder() -> None:
    for path in (ROOT / "deploy").glob("Dockerfile*"):
        assert re.search(r"^\s+(ENV )?PYTHONSAFEPATH=1\b", path.read_text(), re.MULTILINE), path


def test_python_is_started_in_one_place() -> None:
    """What else names the interpreter starts no module with it, or starts one with -P: releases, generated code, a node's worker."""
    named = {}
    for path in files("*.py"):
        uses = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and node.attr in {"executable", "set_executable"}
        ]
        if uses:
            named[path.name] = len(uses)
    assert named == {
        "processes.py": 1,
        "doctor.py": 1,
        "generate.py": 3,
        "make_release.py": 4,
        "task_host.py": 1,
        "task_worker.py": 2,
    }


def test_no_library_may_run_the_code_of_a_model() -> None:
    """Where the answer is not given, transformers asks for it on standard input."""
    seen, wrong = 0, []
    for path in files("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            call = ast.unparse(node.func)
            options = {option.arg: option.value for option in node.keywords}
            if node.func.attr in {"from_pretrained", "from_config"} and "Peft" not in call:
                seen += 1
                off = options.get("trust_remote_code")
                wrong += [] if isinstance(off, ast.Constant) and off.value is False else [f"{path.name}: {call}"]
            if call == "torch.load":
                seen += 1
                only = options.get("weights_only")
                wrong += [] if isinstance(only, ast.Constant) and only.value is True else [f"{path.name}: {call}"]
    assert seen >= 9
    assert wrong == []

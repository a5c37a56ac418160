"""``slipway submit`` and the coordinator that commands name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands.cli import Done, in_process
from support.coordinators.harness import Harness


def test_no_coordinator_is_a_usage_error_and_an_absent_one_is_unavailable(
    capfd: pytest.CaptureFixture[str], home: Path
) -> None:
    assert in_process(capfd, "watch", "e-1", home=home).code == 2
    done = in_process(capfd, "get", "e-1", "--coordinator", "127.0.0.1:9", "--json", home=home)
    assert (done.code, done.json["reason"]) == (7, "COORDINATOR_UNAVAILABLE")
    done = in_process(capfd, "get", "e-1", "--coordinator", "coordinator", "--json", home=home)
    assert (done.code, done.json["reason"]) == (3, "CONFIGURATION_INVALID")


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Run a coordinator with a store and without a worker."""
    with Harness(tmp_path_factory.mktemp("coordinator"), with_worker=False) as running:
        yield running


def test_exports_are_submitted_with_a_priority_and_listed_by_a_filter(
    capfd: pytest.CaptureFixture[str], home: Path, harness: Harness, run: Path
) -> None:
    def call(*words: str | Path) -> Done:
        return in_process(capfd, *words, "--coordinator", harness.address, "--json", home=home)

    made = call("submit", "--checkpoint", run, "--base-model", run.parent / "base", "--priority", "7").json
    assert made["priority"] == 7
    quiet = call("submit", "--checkpoint", run, "--base-model", run.parent / "base", "--progress", "json")
    said = [json.loads(line) for line in quiet.err.splitlines()]
    assert "checkpoint-10" in " ".join(line["message"] for line in said if line["level"] == "warning")
    listed = {text: call("list", "--filter", text).json["exports"] for text in ("", "state!=failed", "state=failed")}
    assert {text: [export["name"] for export in found] for text, found in listed.items()} == {
        "": [made["name"]],
        "state!=failed": [made["name"]],
        "state=failed": [],
    }
    told = in_process(
        capfd,
        "submit",
        "--checkpoint",
        run,
        "--base-model",
        run.parent / "base",
        "--coordinator",
        harness.address,
        home=home,
    )
    name = made["name"].rpartition("/")[2]
    assert told.out.startswith("checkpoint-5 of run onto base")
    assert f"slipway watch {name} --coordinator {harness.address}" in told.err
    again = f"slipway export --base-model {run.parent / 'base'} --checkpoint {run} --coordinator {harness.address}"
    assert again in [line.strip() for line in told.err.splitlines()]
    words = (
        run,
        "--base-model",
        run.parent / "base",
        "-f",
        "GGUF:q4_k_m",
        "-f",
        "onnx:none+int8",
        "--target",
        "Ollama",
    )
    formats = call("submit", *words).json["configuration"]["formats"]
    enabled = {name: each["quantization"]["levels"] for name, each in formats.items() if each.get("enabled")}
    assert enabled == {"gguf": ["q4_k_m"], "onnx": ["int8"]}
    assert (formats["gguf"]["unquantized"], formats["onnx"]["unquantized"]) == (False, True)
    told = in_process(capfd, "submit", *words, "--coordinator", harness.address, home=home)
    again = (
        f"slipway export {' '.join(map(str, words[:3]))} --target Ollama -f GGUF:q4_k_m -f onnx:none+int8 --coordinator"
    )
    assert again in told.err
    wrong = call("list", "--filter", "colour=red")
    assert (wrong.code, wrong.json["reason"]) == (3, "REQUEST_INVALID")
    assert call("submit", "--priority", "1000").code == 2


def test_digests_are_looked_up_at_the_coordinator_that_is_named(
    capfd: pytest.CaptureFixture[str], home: Path, harness: Harness, run: Path
) -> None:
    """Without a store here: a plan, the checkpoints of a run, and the checksums of a damaged artifact."""

    def call(*words: str | Path) -> Done:
        return in_process(capfd, *words, "--coordinator", harness.address, "--json", home=home)

    adapter, base = (call("push", folder).json["digest"] for folder in (run, run.parent / "base"))
    planned = call("export", "--plan", "--checkpoint", adapter, "--base-model", base)
    assert planned.code == 0, planned.out
    assert planned.json["sources"] == {
        "base": base,
        "checkpoint": f"{adapter}/checkpoint-5",
        "heldout": None,
        "calibration": None,
    }
    found = call("checkpoints", adapter).json
    assert found["latest"] == f"{adapter}/checkpoint-5"
    assert call("verify", base).json == {
        "path": base,
        "files": len(list((run.parent / "base").iterdir())),
        "signed_by": "",
        "signer": "",
        "verdict": "",
        "success": True,
    }
    assert not (home / "store").exists()

    absent = "sha256:" + "0" * 64
    for words in (("checkpoints", absent), ("verify", absent), ("export", "--plan", "--checkpoint", absent)):
        done = call(*words)
        assert done.code == 3
        assert "ARTIFACT_NOT_FOUND" in done.out
    blob = max((harness.store.root / "blobs").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    blob.chmod(0o644)
    blob.write_bytes(bytes(blob.stat().st_size))
    damaged = [call("verify", digest) for digest in (adapter, base)]
    assert sorted(done.code for done in damaged) == [0, 7]
    assert {done.json.get("reason") for done in damaged} == {None, "ARTIFACT_CORRUPT"}
    assert list((home / "scratch").iterdir()) == []

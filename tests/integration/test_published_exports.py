"""``slipway export`` with ``output.destinations``: what a real export delivers is published, once, also through a coordinator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands.cli import SLIPWAY, Done, slipway
from support.commands.delivered_folders import make_keys
from support.coordinators.harness import process, wait_for
from support.models import tiny_models
from support.models.sweeps import make_sweep
from support.servers.free_ports import free_port
from support.servers.registry_server import RegistryServer, needs_registry, registry_server
from support.servers.s3_server import BUCKET, S3Server

pytestmark = [pytest.mark.slow, needs_registry]
pytest.importorskip("model_signing", reason="the extra publish is not installed")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    make_keys(root)
    return root


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryServer]:
    with registry_server(tmp_path / "registry") as server:
        yield server


def export(project: Path, out: Path, addresses: str, *more: str | Path, **environment: str) -> Done:
    """The merge alone, for speed."""
    settings = ("formats.onnx.enabled=false", "validation.enabled=false", f"output.destinations={addresses}")
    words = [word for setting in settings for word in ("--set", setting)]
    where = ("--base-model", project / "base", "--out", out)
    home = project / "home"
    environment |= {"DOCKER_CONFIG": str(out), "SLIPWAY_SIGNING_KEY": str(project / "key.pem")}
    return slipway("export", project / "run", "--json", *where, *words, *more, home=home, **environment)


def test_an_export_is_published_and_what_failed_is_published_by_the_same_command(
    project: Path, tmp_path: Path, registry: RegistryServer, s3: S3Server
) -> None:
    bucket, oci = f"s3://{BUCKET}/exports/{{model_name}}", f"oci://{registry.host}/models/{{model_name}}:v1"
    missing = "s3://no-such-bucket-here/x"
    planned = export(project, tmp_path, f"{oci},{missing}", "--plan", **s3.environment())
    assert planned.code == 3, planned.err
    findings = {each["check"]: each for each in planned.json["preflight"]["findings"]}
    assert findings[f"publish: {missing}"]["reason"] == "STORE_INVALID"
    assert findings[f"publish: {oci}"]["verdict"] == findings["publish: signing key"]["verdict"] == "ok"
    refused = export(project, tmp_path, f"{oci},{missing}", **s3.environment())
    assert (refused.code, refused.json["reason"]) == (3, "STORE_INVALID")
    assert list(tmp_path.glob("run_*")) == []

    done = export(project, tmp_path, f"{oci},{bucket}", "--set", "output.license=MIT", **s3.environment())
    assert done.code == 0, done.err
    first, second = done.json["published"]
    assert first["address"].startswith(f"oci://{registry.host}/models/run@sha256:")
    assert second["address"] == f"s3://{BUCKET}/exports/run"
    assert first["sent_bytes"] == pytest.approx(second["sent_bytes"], rel=0.1)
    assert first["sent_bytes"] > 100_000
    verified = slipway("verify", first["address"], "--key", project / "key.pub", "--json", home=project / "home")
    assert (verified.code, verified.json["verdict"]) == (0, "incomplete"), verified.err
    folder = Path(done.json["output_directory"])
    assert "MIT" in (folder / "bom.cdx.json").read_text()
    assert json.loads((folder / "report.json").read_text())["result"]["published"] == []

    again = export(project, tmp_path, f"{oci},{bucket}", **s3.environment())
    assert again.code == 0, again.err
    assert again.json["output_directory"] == str(folder)
    assert [each["sent_bytes"] for each in again.json["published"]] == [0, 0]
    assert again.json["published"][0]["address"] == first["address"]
    check_published_by_name(done.json["export_id"], project, tmp_path, s3)


def check_published_by_name(name: str, project: Path, tmp_path: Path, s3: S3Server, *where: str) -> None:
    """An export by its id: the second time nothing is sent, and nothing is left in the scratch folder."""
    home = project / "home"
    address = f"s3://{BUCKET}/by-name/{tmp_path.name}"
    sent = []
    for _ in range(2):
        published = slipway("publish", name, address, *where, "--json", home=home, **s3.environment())
        assert published.code == 0, published.err
        document = published.json
        assert (document["export"], document["folder"], document["verdict"]) == (name, "", "incomplete")
        assert document["destinations"][0]["address"] == address
        sent.append(document["destinations"][0]["sent_bytes"])
    assert sent[0] > 100_000
    assert sent[1] == 0
    assert list((home / "scratch").glob("*delivered-*")) == []


def test_a_destination_that_refuses_after_the_work_leaves_the_delivery(
    project: Path, tmp_path: Path, s3: S3Server
) -> None:
    """A reader may list a bucket, which is all that is asked before the work, and may not write."""
    from support.servers.s3_server import READER_KEY, READER_SECRET

    reader = {**s3.environment(), "AWS_ACCESS_KEY_ID": READER_KEY, "AWS_SECRET_ACCESS_KEY": READER_SECRET}
    address = f"s3://{BUCKET}/refused/x"
    failed = export(project, tmp_path, address, **reader)
    assert failed.code == 3, failed.err
    assert (failed.json["success"], failed.json["reason"]) == (False, "STORE_DENIED")
    assert failed.json["published"][0]["reason"] == "STORE_DENIED"
    folder = Path(failed.json["output_directory"])
    assert (folder / "pytorch" / "model.safetensors").is_file()
    done = export(project, tmp_path, address, **s3.environment())
    assert done.code == 0, done.err
    assert done.json["output_directory"] == str(folder)
    assert done.json["published"][0]["sent_bytes"] > 100_000


def test_each_export_of_a_batch_is_published_at_its_own_address(tmp_path: Path, s3: S3Server) -> None:
    sweep = make_sweep(tmp_path, "a", "b")
    where = ("--base-model", sweep.parent / "base", "--out", tmp_path / "out", "-f", "pytorch")
    words = ("export", "--each", sweep, "--json", *where, "--set", "validation.enabled=false", "--set")
    home = tmp_path / "home"
    clash = slipway(*words, f"output.destinations=s3://{BUCKET}/batch", home=home, **s3.environment())
    assert (clash.code, clash.json["reason"]) == (3, "OUTPUT_CLASH")
    for sent in (True, False):
        done = slipway(*words, f"output.destinations=s3://{BUCKET}/batch/{{model_name}}", home=home, **s3.environment())
        assert done.code == 0, done.err
        published = [each["result"]["published"][0] for each in done.json["exports"]]
        assert [each["address"] for each in published] == [f"s3://{BUCKET}/batch/{name}" for name in "ab"]
        assert [each["sent_bytes"] > 0 for each in published] == [sent, sent]


def test_the_client_of_a_coordinator_publishes(project: Path, tmp_path: Path, s3: S3Server) -> None:
    address, site = f"127.0.0.1:{free_port()}", tmp_path / "site"
    where, home = ("--coordinator", address), {"SLIPWAY_HOME": str(site)}
    coordinator = [SLIPWAY, "coordinator", "--listen", address, "--state", str(tmp_path / "state.db")]
    worker = [SLIPWAY, "worker", "--coordinator", address, "--stage", "merge", "--drain-seconds", "0"]
    out = tmp_path / "out"
    with (
        process(coordinator, tmp_path / "coordinator.log", **home),
        process(worker, tmp_path / "worker.log", **home),
    ):
        wait_for(lambda: slipway("list", *where, home=site).code == 0)
        submitted = slipway(
            "submit", project / "run", "--base-model", project / "base", *where, "-f", "pytorch",
            "--set", "validation.enabled=false", "--set", f"output.destinations=s3://{BUCKET}/remote/x", "--json", home=site,
        )  # fmt: skip
        assert submitted.code == 0, submitted.err
        assert "slipway submit does not publish" in submitted.err
        done = export(project, out, f"s3://{BUCKET}/remote/a", *where, **s3.environment())
        assert done.code == 0, done.err
        assert done.json["published"][0]["address"] == f"s3://{BUCKET}/remote/a"
        other = export(project, out, f"s3://{BUCKET}/remote/a,s3://{BUCKET}/remote/b", *where, **s3.environment())
        assert other.code == 0, other.err
        assert other.json["output_directory"] == done.json["output_directory"]
        assert [each["sent_bytes"] > 0 for each in other.json["published"]] == [False, True]
        check_published_by_name(done.json["export_id"], project, tmp_path, s3, *where)

"""Registering in a Kubeflow Model Registry: what it holds then, that nothing is registered twice, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway.configuration import files_address
from slipway.errors import ModelExportError
from slipway.publishing.destination import Access
from slipway.publishing.publication import SIGNATURE
from slipway.publishing.publisher import keeps_versions, publish, reach_destination
from support.commands import report_parts
from support.commands.cli import in_process
from support.commands.delivered_folders import make_delivered
from support.coordinators.own_environments import VARIABLE
from support.servers.free_ports import free_port
from support.servers.model_registry import ModelRegistry, faults, model_registry
from support.servers.registry_server import RegistryServer, needs_registry
from support.servers.s3_server import BUCKET, S3Server

pytest.importorskip("model_signing", reason="the extra publish is not installed")
CLIENT = Path(os.environ.get(VARIABLE, "/nonexistent"), "model-registry", "bin", "python")


@pytest.fixture
def models() -> Iterator[ModelRegistry]:
    with model_registry() as server:
        yield server
        assert server.refused == [], "every request and answer is one of the protocol"


@pytest.fixture
def known(models: ModelRegistry, s3: S3Server, access: Access) -> Access:
    environment = {**access.environment, **s3.environment(), "KUBEFLOW_MODEL_REGISTRY": f"{models.address}/"}
    return Access(access.settings.from_environment(environment), environment, patience_seconds=1)


def plain(properties: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: next(v for key, v in value.items() if key != "metadataType") for name, value in properties.items()}


def test_a_version_has_an_artifact_for_each_output(
    models: ModelRegistry, known: Access, folder: Path, keys: tuple[Path, Path]
) -> None:
    url = f"kubeflow:qwen3 support@s3://{BUCKET}/kubeflow/first"
    done = publish(folder, [url], access=known, key=keys[0]).destinations[0]
    (model,), (version,) = models.entities["registered_models"], models.entities["model_versions"]
    assert (model["name"], version["registeredModelId"], version["state"]) == ("qwen3 support", model["id"], "LIVE")
    said = plain(version["customProperties"])
    expected = {
        "slipway.export": "abc123",
        "slipway.verdict": "passed",
        "slipway.signed": True,
        "slipway.registered": True,
    }
    assert expected.items() <= said.items()
    assert (said["slipway.address"], said["slipway.source.adapter"]) == (done.address, "sha256:" + "2" * 64)
    artifacts = {each["name"]: each for each in models.entities["model_artifacts"]}
    assert artifacts.keys() == {"gguf-q4_k_m", "onnx-int4"}
    gguf = artifacts["gguf-q4_k_m"]
    assert (gguf["uri"], gguf["modelFormatName"]) == (f"{done.address}/gguf-q4_k_m", "gguf")
    figures = plain(gguf["customProperties"])
    assert (figures["slipway.kl"], figures["slipway.level"], figures["slipway.status"]) == (0.004, "q4_k_m", "passed")
    assert done.details["registered"] == {
        "model": "qwen3 support",
        "version": version["name"],
        "version_id": version["id"],
    }


def test_nothing_is_registered_twice(
    models: ModelRegistry, known: Access, folder: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    url = f"kubeflow:twice@s3://{BUCKET}/kubeflow/twice"
    first = publish(folder, [url], access=known, key=keys[0]).destinations[0]
    before = json.dumps(models.entities)
    models.entities["model_versions"][0]["state"] = "ARCHIVED"  # by somebody who looks after them
    models.requests.clear()
    (folder / SIGNATURE).unlink()  # an export that is delivered for this alone is signed anew each time
    again = publish(folder, [url], access=known, key=keys[0]).destinations[0]
    assert (again.details, {method for method, _ in models.requests}) == (first.details, {"GET"})
    models.entities["model_versions"][0]["state"] = "LIVE"
    assert json.dumps(models.entities) == before, "an archived version stays archived, and all else as it was"
    other = make_delivered(tmp_path / "other", report_parts.output("onnx-int4", 0.001), size=3100)
    publish(other, [url], access=known)
    assert [len(each) for each in models.entities.values()] == [1, 2, 3]
    moved = url.replace("/twice", "/elsewhere", 1)
    publish(other, [moved], access=known)
    assert [len(each) for each in models.entities.values()] == [1, 2, 3]
    assert models.entities["model_artifacts"][-1]["uri"].endswith("/elsewhere/onnx-int4")
    version = models.entities["model_versions"][-1]
    version["customProperties"]["owner"] = {"metadataType": "MetadataStringValue", "string_value": "us"}
    assert plain(version["customProperties"])["slipway.address"].endswith("/elsewhere")
    assert plain(version["customProperties"])["slipway.signed"] is False
    version["state"] = "ARCHIVED"
    publish(other, [moved], access=known, key=keys[0])
    said = plain(version["customProperties"])
    assert (said["slipway.signed"], said["owner"], version["state"]) == (True, "us", "ARCHIVED")


def test_an_interruption_leaves_an_archived_version_that_is_completed(
    models: ModelRegistry, known: Access, folder: Path
) -> None:
    url = f"kubeflow:broken@s3://{BUCKET}/kubeflow/broken"
    models.change = lambda method, path: (403, b"{}") if method == "POST" and path.endswith("/artifacts") else None
    with pytest.raises(ModelExportError) as caught:
        publish(folder, [url], access=known)
    assert caught.value.reason == "STORE_DENIED"
    assert [each["state"] for each in models.entities["model_versions"]] == ["ARCHIVED"]
    models.change = lambda method, path: (403, b"{}") if method == "PATCH" else None
    with pytest.raises(ModelExportError):
        publish(folder, [url], access=known)
    assert [each["state"] for each in models.entities["model_versions"]] == ["ARCHIVED"]
    models.change = lambda *_: None
    publish(folder, [url], access=known)
    assert [each["state"] for each in models.entities["model_versions"]] == ["LIVE"]
    assert [len(each) for each in models.entities.values()] == [1, 1, 2]


def test_another_client_may_make_the_model_at_the_same_time(models: ModelRegistry, known: Access, folder: Path) -> None:
    asked: list[str] = []

    def late(method: str, path: str) -> tuple[int, bytes] | None:
        if method == "GET" and "registered_model?" in path:
            asked.append(path)
            if len(asked) == 1:
                models.entities["registered_models"].append(
                    {
                        "name": "race",
                        "id": "77",
                        "_parent": "",
                        "createTimeSinceEpoch": "1",
                        "lastUpdateTimeSinceEpoch": "1",
                    }
                )
                return 404, b'{"code": "404", "message": "none yet"}'
        return None

    models.change = late
    publish(folder, [f"kubeflow:race@s3://{BUCKET}/kubeflow/race"], access=known)
    assert (len(asked), models.entities["model_versions"][0]["registeredModelId"]) == (2, "77")


def test_an_answer_that_was_lost_is_asked_for_again(models: ModelRegistry, known: Access, folder: Path) -> None:
    lost: set[str] = set()

    def lose(method: str, path: str) -> bool:
        once = method != "GET" and path not in lost
        lost.update([path] if once else [])
        return once

    models.loses = lose
    url = f"kubeflow:lost@s3://{BUCKET}/kubeflow/lost"
    publish(folder, [url], access=replace(known, patience_seconds=60))
    assert [len(each) for each in models.entities.values()] == [1, 1, 2]
    assert (len(lost), models.entities["model_versions"][0]["state"]) == (4, "LIVE")


@needs_registry
def test_an_output_in_a_registry_is_named_as_kserve_takes_it(
    models: ModelRegistry, known: Access, registry: RegistryServer, folder: Path
) -> None:
    place = f"oci://{registry.host}/kubeflow/run:v1"
    done = publish(folder, [f"kubeflow:oci@{place}?modelcar"], access=known).destinations[0]
    artifacts = {each["name"]: each["uri"] for each in models.entities["model_artifacts"]}
    assert artifacts == {name: each["uri"] for name, each in done.details["modelcars"].items()}
    done = publish(folder, [f"kubeflow:oci@{place}"], access=known).destinations[0]
    artifacts = {each["name"]: each["uri"] for each in models.entities["model_artifacts"]}
    name = done.address.partition("@")[0]
    assert artifacts == {each: f"{name}@{found['digest']}" for each, found in done.details["variants"].items()}


def test_the_token_is_asked_for_and_kept(
    s3: S3Server, known: Access, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"kubeflow:secret@s3://{BUCKET}/kubeflow/secret"
    (tmp_path / "token").write_text("a-secret-token\n")
    with model_registry(token="a-secret-token") as server:
        environment = {**known.environment, "KUBEFLOW_MODEL_REGISTRY": server.address}
        for named, reason in [
            ({}, "STORE_DENIED"),
            ({"KUBEFLOW_MODEL_REGISTRY_TOKEN": "another"}, "STORE_DENIED"),
            ({"KUBEFLOW_MODEL_REGISTRY_TOKEN": "two words"}, "STORE_DENIED"),
            ({"KF_PIPELINES_SA_TOKEN_PATH": str(tmp_path / "absent")}, "STORE_DENIED"),
            ({"KF_PIPELINES_SA_TOKEN_PATH": "/dev/zero"}, "STORE_DENIED"),
        ]:
            with pytest.raises(ModelExportError) as caught:
                reach_destination(url, replace(known, environment={**environment, **named}))
            assert (caught.value.reason, "secret-token" in str(caught.value)) == (reason, False)
        for named in (
            {"KUBEFLOW_MODEL_REGISTRY_TOKEN": "a-secret-token"},
            {"KF_PIPELINES_SA_TOKEN_PATH": str(tmp_path / "token")},
        ):
            reach_destination(url, replace(known, environment={**environment, **named}))
        elsewhere = {
            "KUBEFLOW_MODEL_REGISTRY": "http://registry.example.com",
            "KUBEFLOW_MODEL_REGISTRY_TOKEN": "a-secret-token",
        }
        with pytest.raises(ModelExportError, match="plain HTTP") as caught:
            reach_destination(url, replace(known, environment={**environment, **elsewhere}))
        assert caught.value.reason == "DESTINATION_INVALID"
        publish(
            folder,
            [url],
            access=replace(known, environment={**environment, "KUBEFLOW_MODEL_REGISTRY_TOKEN": "a-secret-token"}),
        )
        assert server.refused == []


def test_a_token_that_is_replaced_meanwhile_is_read_again(
    s3: S3Server, known: Access, folder: Path, tmp_path: Path
) -> None:
    """An upload takes hours, and tokens of a cluster an hour at most."""
    file = tmp_path / "token"
    file.write_text("first")
    with model_registry(token="first") as server:

        def expire(method: str, path: str) -> tuple[int, bytes] | None:
            if "pageSize" not in path:
                return None
            server.token = "second"
            file.write_text(server.token)
            return 200, b'{"items": []}'

        server.change = expire
        named = {"KUBEFLOW_MODEL_REGISTRY": server.address, "KF_PIPELINES_SA_TOKEN_PATH": str(file)}
        publish(
            folder,
            [f"kubeflow:hours@s3://{BUCKET}/kubeflow/hours"],
            access=replace(known, environment={**known.environment, **named}),
        )
        assert server.refused == []


@pytest.mark.parametrize(
    "url",
    ["kubeflow:", "kubeflow:name", "kubeflow:name@", "kubeflow:@s3://a/b", "kubeflow:a/b@s3://a/b", "kubeflow:name@ftp://host/secret", "kubeflow:a@kubeflow:b@s3://a/b", "kubeflow:é@s3://a/b", "kubeflow:n@oci://host/UPPER"],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str, known: Access) -> None:
    with pytest.raises(ModelExportError) as caught:
        reach_destination(url, known)
    assert caught.value.reason == "DESTINATION_INVALID"


@pytest.mark.parametrize(
    "server",
    [
        "",
        "registry",
        "http://host:abc",
        "http://host:99999",
        "ftp://host",
        "http://user:secret@host",
        "http://host?x=secret",
        "http://[",
        "https://",
    ],
)
def test_what_is_no_server_is_refused(server: str, known: Access) -> None:
    environment = {**known.environment, "KUBEFLOW_MODEL_REGISTRY": server}
    with pytest.raises(ModelExportError) as caught:
        reach_destination(f"kubeflow:x@s3://{BUCKET}/x", replace(known, environment=environment))
    assert (caught.value.reason, "secret" in str(caught.value)) == ("DESTINATION_INVALID", False)


@pytest.mark.parametrize(
    ("status", "data", "reason"),
    [
        (200, b"", "STORE_INVALID"),
        (200, b"<html>", "STORE_INVALID"),
        (200, b"[]", "STORE_INVALID"),
        (200, b'{"items": 5}', "STORE_INVALID"),
        (200, b"[" * 100_000, "STORE_INVALID"),
        (200, b" " * (5 << 20), "STORE_INVALID"),
        (302, b"", "STORE_INVALID"),
        (401, b'{"message": "who?"}', "STORE_DENIED"),
        (404, b"\xff", "STORE_INVALID"),
        (500, b"{}", "STORE_UNAVAILABLE"),
    ],
)
def test_a_server_that_answers_something_else_is_refused(
    models: ModelRegistry, known: Access, status: int, data: bytes, reason: str
) -> None:
    models.change = lambda *_: (status, data)
    with pytest.raises(ModelExportError) as caught:
        reach_destination(f"kubeflow:x@s3://{BUCKET}/x", known)
    assert caught.value.reason == reason
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b'{"id": 5}',
        b'{"id": "../x"}',
        b"[]",
        b"null",
        b'{"id": "1", "customProperties": 5}',
        b'{"id": "1", "customProperties": {"a": "b"}}',
    ],
)
def test_an_entity_without_an_id_or_with_odd_properties_is_refused(
    models: ModelRegistry, known: Access, folder: Path, data: bytes
) -> None:
    models.change = lambda _, path: (200, data) if "registered_model?" in path else None
    with pytest.raises(ModelExportError) as caught:
        publish(folder, [f"kubeflow:x@s3://{BUCKET}/kubeflow/x"], access=known)
    assert caught.value.reason == "STORE_INVALID"


def test_a_server_that_is_away_is_named(known: Access) -> None:
    environment = {**known.environment, "KUBEFLOW_MODEL_REGISTRY": f"http://127.0.0.1:{free_port()}"}
    with pytest.raises(ModelExportError) as caught:
        reach_destination(f"kubeflow:x@s3://{BUCKET}/x", replace(known, environment=environment))
    assert caught.value.reason == "STORE_UNAVAILABLE"


def test_a_server_of_another_version_is_spoken_to_in_it(models: ModelRegistry, known: Access, folder: Path) -> None:
    models.versions = ("v1",)
    publish(folder, [f"kubeflow:later@s3://{BUCKET}/kubeflow/later"], access=known)
    assert [len(each) for each in models.entities.values()] == [1, 1, 2]
    assert {path.split("/")[3] for _, path in models.requests[1:]} == {"v1"}
    models.versions = ("v2",)
    with pytest.raises(ModelExportError) as caught:
        reach_destination(f"kubeflow:later@s3://{BUCKET}/x", known)
    assert caught.value.reason == "STORE_INVALID"


def test_the_files_decide_whether_versions_are_kept() -> None:
    assert keeps_versions("kubeflow:x@mlflow:x")
    assert not keeps_versions("kubeflow:x@s3://a/b")
    assert files_address("kubeflow:x@hf://a/b@v1?public") == files_address("hf://a/b@v1") == "hf://a/b@v1"
    assert files_address("oci://host/a:v1?modelcar=x:1") == "oci://host/a:v1"


def test_the_stand_in_finds_what_the_protocol_does_not_have() -> None:
    version = {"$ref": "#/components/schemas/ModelVersion"}
    right = {
        "name": "v",
        "registeredModelId": "1",
        "customProperties": {"a": {"metadataType": "MetadataBoolValue", "bool_value": True}},
    }
    assert faults(right, version) == []
    for wrong in (
        {**right, "colour": "red"},
        {"name": "v"},
        {**right, "state": "LOST"},
        {**right, "registeredModelId": "x"},
        {**right, "customProperties": {"a": {"metadataType": "MetadataDoubleValue", "double_value": "1"}}},
        {**right, "customProperties": {"a": {"metadataType": "MetadataOddValue"}}},
        {**right, "customProperties": {"a": {"metadataType": "MetadataBoolValue", "bool_value": True, "more": 1}}},
    ):
        assert faults(wrong, version), wrong


def test_the_command_registers(
    models: ModelRegistry, s3: S3Server, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    named = {**s3.environment(), "KUBEFLOW_MODEL_REGISTRY": models.address}
    words = ("publish", folder, f"kubeflow:cli@s3://{BUCKET}/kubeflow/cli", "--json")
    done = in_process(capfd, *words, home=tmp_path / "home", **named)
    assert (done.code, done.json["destinations"][0]["registered"]["model"]) == (0, "cli"), done.err


JUDGE = """
import json, sys
from model_registry import ModelRegistry
registry = ModelRegistry("http://127.0.0.1", int(sys.argv[1]), author="judge", is_secure=False, user_token="t")
model = registry.get_registered_model("judged")
(version,) = registry.get_model_versions("judged")
artifact = registry.get_model_artifact("judged", version.name)
print(json.dumps({"model": model.name, "version": version.custom_properties, "uri": artifact.uri}))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not CLIENT.exists(), reason=f"{VARIABLE} names no environment model-registry (pip install model-registry)"
)
def test_the_project_s_own_client_reads_it(models: ModelRegistry, known: Access, tmp_path: Path) -> None:
    folder = make_delivered(tmp_path / "judged", report_parts.output("onnx-int4", 0.002))
    models.versions = ("v1alpha3", "v1")
    done = publish(folder, [f"kubeflow:judged@s3://{BUCKET}/kubeflow/judged"], access=known).destinations[0]
    words = [CLIENT, "-c", JUDGE, models.address.rpartition(":")[2]]
    ran = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}, timeout=120)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert (said["model"], said["uri"]) == ("judged", f"{done.address}/onnx-int4")
    assert (said["version"]["slipway.verdict"], said["version"]["slipway.signed"]) == ("passed", False)

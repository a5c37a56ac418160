"""Publishing to a real MLflow server: a version appears last, once, and holds the whole folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slipway.errors import ModelExportError
from slipway.publishing.destination import Access
from slipway.publishing.publisher import publish
from slipway.publishing.signatures.trust import TrustedKey
from slipway.publishing.verification import check_folder
from support.commands.delivered_folders import make_delivered
from support.servers.mlflow_server import mlflow_server, needs_mlflow

pytest.importorskip("model_signing", reason="the extra publish is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as address:
        yield address


@pytest.fixture
def served(access: Access, server: str, monkeypatch: pytest.MonkeyPatch) -> Access:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")  # its client would leave a variable in this process
    return replace(access, environment={**access.environment, "MLFLOW_TRACKING_URI": server})


@needs_mlflow
def test_a_version_holds_the_folder_and_is_made_once(
    served: Access, server: str, folder: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    from mlflow import MlflowClient
    from mlflow.artifacts import download_artifacts

    first = publish(folder, ["mlflow:run-of tests"], access=served, key=keys[0]).destinations[0]
    assert first.address == "models:/run-of tests/1"
    again = publish(folder, ["mlflow:run-of tests"], access=served, key=keys[0]).destinations[0]
    assert (again.address, again.sent_bytes) == (first.address, 0)
    client = MlflowClient(tracking_uri=server, registry_uri=server)
    version = client.get_model_version("run-of tests", "1")
    assert {
        "slipway.verdict": "passed",
        "slipway.signed": "true",
        "slipway.export": "abc123",
    }.items() <= version.tags.items()
    run = client.get_run(version.run_id)
    assert (run.info.status, run.data.metrics["onnx-int4/mean_kl"]) == ("FINISHED", 0.002)
    copy = Path(download_artifacts(version.source, dst_path=str(tmp_path / "copy"), tracking_uri=server))
    assert check_folder(copy, trusted=TrustedKey(keys[1])).verdict == "passed"
    other = make_delivered(tmp_path / "other", size=3100)
    assert publish(other, ["mlflow:run-of tests"], access=served).destinations[0].address == "models:/run-of tests/2"


@needs_mlflow
def test_an_interruption_makes_no_version(served: Access, server: str, folder: Path) -> None:
    from mlflow import MlflowClient

    pieces: list[int] = []

    def count(size: int) -> None:
        pieces.append(size)
        if len(pieces) > len(list(folder.rglob("*"))) + 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(folder, ["mlflow:interrupted"], access=served, show=lambda _: count)
    client = MlflowClient(tracking_uri=server, registry_uri=server)
    experiment = client.get_experiment_by_name("interrupted")
    assert experiment is not None
    assert [run.info.status for run in client.search_runs([experiment.experiment_id])] == ["KILLED"]
    assert list(client.search_model_versions("name='interrupted'")) == []
    assert publish(folder, ["mlflow:interrupted"], access=served).destinations[0].address == "models:/interrupted/1"


@pytest.mark.parametrize("url", ["mlflow:", "mlflow:a/b", "mlflow:a'b", "mlflow://host:1/x", "mlflow:" + "x" * 300])
def test_a_name_that_is_none_is_refused(access: Access, folder: Path, url: str) -> None:
    named = replace(access, environment={**access.environment, "MLFLOW_TRACKING_URI": "http://127.0.0.1:1"})
    with pytest.raises(ModelExportError) as caught:
        publish(folder, [url], access=named)
    assert caught.value.reason == "DESTINATION_INVALID"


def test_a_server_must_be_named_and_answer(access: Access, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    with pytest.raises(ModelExportError, match="MLFLOW_TRACKING_URI") as caught:
        publish(folder, ["mlflow:x"], access=access)
    assert caught.value.reason == "DESTINATION_INVALID"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = replace(access, environment={**access.environment, "MLFLOW_TRACKING_URI": "http://me:a-secret@127.0.0.1:1"})
    with pytest.raises(ModelExportError) as caught:
        publish(folder, ["mlflow:x"], access=away)
    assert caught.value.reason == "STORE_UNAVAILABLE"
    assert "a-secret" not in str(caught.value)

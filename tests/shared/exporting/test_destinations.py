"""Publishing after an export: what is checked before the work, what is published where, and what a failing destination leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import slipway
from slipway.configuration import ExportConfiguration, LoadedConfiguration, render_address
from slipway.configuration.values import PLACEHOLDERS
from slipway.errors import StageError
from slipway.exporting.destinations import Publisher, check_destinations, require_destinations
from slipway.exporting.interruption import Interruption
from slipway.exporting.planned import make_plan
from slipway.planning.preflight import Verdict
from slipway.progress.observer import Silent
from slipway.publishing.publication import SIGNATURE
from slipway.publishing.signatures.trust import TrustedKey
from slipway.publishing.verification import check_folder
from slipway.results.result import ExportResult
from slipway.settings import Settings
from support.commands import report_parts
from support.commands.delivered_folders import make_delivered, make_keys
from support.models.sweeps import make_sweep
from support.servers.free_ports import free_port
from support.servers.model_registry import model_registry
from support.servers.s3_server import BUCKET, SECRET_KEY, S3Server

pytest.importorskip("model_signing", reason="the extra publish is not installed")

VALUES = {"model_name": "qwen3", "checkpoint": "checkpoint-10", "export_id": "e-01", "timestamp": "20261121_020758"}


class Kept(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.logged: list[tuple[int, str]] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    def log(self, level: int, message: str) -> None:
        self.logged.append((level, message))


def configuration(*destinations: str, **output: str) -> ExportConfiguration:
    return slipway.parse_configuration({"output": {"destinations": list(destinations), **output}})


@pytest.fixture
def machine(tmp_path: Path, s3: S3Server) -> Settings:
    return Settings.from_environment({"SLIPWAY_HOME": str(tmp_path / "home"), **s3.environment()})


@pytest.fixture
def kept() -> Kept:
    return Kept()


Publish = Callable[..., ExportResult]


@pytest.fixture
def publish(machine: Settings, kept: Kept) -> Publish:
    def run(
        folder: Path, *destinations: str, status: str = "passed", success: bool = True, **output: str
    ) -> ExportResult:
        outputs = (report_parts.output("gguf-q4_k_m", 0.004), report_parts.output("onnx-int4", 0.002))
        result = report_parts.result(report_parts.validation(*outputs), ("gguf-q4_k_m", "onnx-int4"))
        formats = {**result.formats, "onnx-int4": result.formats["onnx-int4"].model_copy(update={"status": status})}
        reason = "" if success else "VALIDATION_FAILED"
        changes = {"output_directory": str(folder), "formats": formats, "success": success, "reason": reason}
        publisher = Publisher(configuration(*destinations, **output), machine, kept, Interruption())
        return publisher.publish(result.model_copy(update=changes), VALUES)

    return run


def unreachable() -> str:
    return f"oci://127.0.0.1:{free_port()}/models/qwen3:v1"


def test_a_delivered_export_is_published_and_the_second_time_nothing_is_sent(
    tmp_path: Path, publish: Publish, kept: Kept
) -> None:
    folder = make_delivered(tmp_path / "run")
    done = publish(folder, f"s3://{BUCKET}/after/{{model_name}}/{{timestamp}}", license="MIT")
    assert (done.success, done.reason) == (True, "")
    (one,) = done.published
    assert one.address == f"s3://{BUCKET}/after/qwen3/20261121_020758"
    assert one.reason == ""
    assert one.sent_bytes > 6000
    assert any(note.startswith(f"publishing at {one.address}: ") for note in kept.notes)
    assert kept.notes[-1] == ""
    assert "MIT" in (folder / "bom.cdx.json").read_text()
    again = publish(folder, f"s3://{BUCKET}/after/{{model_name}}/{{timestamp}}")
    assert (again.published[0].sent_bytes, again.published[0].kept_bytes) == (
        0,
        one.sent_bytes + one.kept_bytes,
    )


def test_a_destination_that_fails_loses_neither_the_delivery_nor_the_others(tmp_path: Path, publish: Publish) -> None:
    folder = make_delivered(tmp_path / "run")
    address = f"s3://{BUCKET}/after/others"
    done = publish(folder, "ftp://nowhere/x", "s3://no-such-bucket-here/x", address)
    assert not done.success
    assert done.output_directory == str(folder)
    assert done.formats.keys() == {"gguf-q4_k_m", "onnx-int4"}
    wrong, missing, good = done.published
    assert (wrong.destination, wrong.address, wrong.reason) == ("ftp://nowhere/x", "", "DESTINATION_INVALID")
    assert (missing.address, missing.reason) == ("", "STORE_INVALID")
    assert (good.address, good.reason) == (address, "")
    assert done.reason in {"DESTINATION_INVALID", "STORE_INVALID"}
    assert f"delivered to {folder}" in done.error_message
    assert "not published at ftp://nowhere/x" in done.error_message
    assert "export again to publish what is missing" in done.error_message
    with pytest.raises(slipway.ModelExportError, match="not published at ftp://nowhere/x"):
        done.require()


@pytest.mark.parametrize(
    ("status", "said"), [("failed", "onnx-int4 failed validation"), ("passed", "the export failed")]
)
def test_an_export_that_failed_is_published_nowhere(
    tmp_path: Path, publish: Publish, kept: Kept, status: str, said: str
) -> None:
    folder = make_delivered(tmp_path / "run")
    done = publish(folder, f"s3://{BUCKET}/after/failed", status=status, success=False)
    assert done.published == ()
    assert done.reason == "VALIDATION_FAILED"
    assert said in done.warnings[-1]
    assert (logging.WARNING, done.warnings[-1]) in kept.logged
    assert not (folder / "bom.cdx.json").exists()


def test_an_output_that_is_kept_though_it_failed_is_not_published(tmp_path: Path, publish: Publish) -> None:
    """With ``validation.on_failure: keep`` the export itself succeeds."""
    from slipway.validation.findings import OutputStatus

    failed = report_parts.output("onnx-int4", 0.9)
    assert failed.status is OutputStatus.FAILED
    folder = make_delivered(tmp_path / "run", report_parts.output("gguf-q4_k_m", 0.004), failed)
    done = publish(folder, f"s3://{BUCKET}/after/kept", status="failed")
    assert (done.success, done.reason) == (False, "VALIDATION_FAILED")
    assert "holds onnx-int4, which failed validation" in done.error_message


def test_a_changed_file_is_published_nowhere(tmp_path: Path, publish: Publish) -> None:
    folder = make_delivered(tmp_path / "run")
    (folder / "onnx-int4" / "model.onnx").write_bytes(b"x")
    done = publish(folder, f"s3://{BUCKET}/after/a", f"s3://{BUCKET}/after/b")
    assert [each.reason for each in done.published] == ["ARTIFACT_CORRUPT"] * 2


def test_an_interruption_is_no_failure_of_a_destination(tmp_path: Path, machine: Settings, kept: Kept) -> None:
    interruption = Interruption()
    folder = make_delivered(tmp_path / "run")
    result = report_parts.result(report_parts.validation(), ()).model_copy(
        update={"output_directory": str(folder), "success": True}
    )
    publisher = Publisher(configuration(f"s3://{BUCKET}/after/interrupted"), machine, kept, interruption)
    interruption.request()
    with pytest.raises(StageError) as caught:
        publisher.publish(result, VALUES)
    assert caught.value.reason == "CANCELLED"


def test_the_machine_names_the_key(tmp_path: Path, machine: Settings, kept: Kept) -> None:
    private, public = make_keys(tmp_path)
    folder = make_delivered(tmp_path / "run")
    result = report_parts.result(report_parts.validation(), ()).model_copy(
        update={"output_directory": str(folder), "success": True}
    )
    signing = machine.model_copy(update={"signing_key": private})
    publisher = Publisher(configuration(f"s3://{BUCKET}/after/signed"), signing, kept, Interruption())
    assert publisher.publish(result, VALUES).success
    assert (folder / SIGNATURE).exists()
    assert check_folder(folder, trusted=TrustedKey(public)).signed_by
    first = (folder / SIGNATURE).read_bytes()
    assert publisher.publish(result, VALUES).published[0].sent_bytes == 0
    assert (folder / SIGNATURE).read_bytes() == first


def test_what_is_missing_is_found_before_the_work(
    tmp_path: Path, machine: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipway.exporting.destinations.CHECK_PATIENCE_SECONDS", 0.1)
    away = unreachable()
    wanted = configuration("ftp://x/y", away, "s3://no-such-bucket-here/x", f"s3://{BUCKET}/ok", "oci://host/Capital")
    findings = {finding.check.removeprefix("publish: "): finding for finding in check_destinations(wanted, machine)}
    reasons = {check: finding.reason for check, finding in findings.items()}
    assert reasons == {
        "ftp://x/y": "DESTINATION_INVALID",
        away: "STORE_UNAVAILABLE",
        "s3://no-such-bucket-here/x": "STORE_INVALID",
        f"s3://{BUCKET}/ok": "",
        "oci://host/Capital": "DESTINATION_INVALID",
    }
    assert "slipway publish" in findings[away].remedy
    with pytest.raises(slipway.ModelExportError) as caught:
        require_destinations(wanted, machine)
    assert caught.value.reason == "DESTINATION_INVALID"
    without = machine.model_copy(update={"s3": type(machine.s3)()})
    (denied,) = check_destinations(configuration(f"s3://{BUCKET}/ok"), without)
    assert (denied.verdict, denied.reason) == (Verdict.ERROR, "STORE_DENIED")
    known: dict[str, Any] = {}
    assert check_destinations(configuration(f"s3://{BUCKET}/ok"), machine, known) == list(*known.values())
    assert check_destinations(configuration(), machine.model_copy(update={"signing_key": tmp_path})) == []


def test_a_key_that_cannot_sign_is_found_before_the_work(
    tmp_path: Path, machine: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, _ = make_keys(tmp_path, passphrase="correct horse")
    locked = machine.model_copy(update={"signing_key": private})
    (key, _place) = check_destinations(configuration(f"s3://{BUCKET}/ok"), locked)
    assert (key.check, key.reason) == ("publish: signing key", "SIGNING_KEY_INVALID")
    monkeypatch.setenv("SLIPWAY_SIGNING_PASSPHRASE", "correct horse")
    assert [each.verdict for each in check_destinations(configuration(f"s3://{BUCKET}/ok"), locked)] == [Verdict.OK] * 2


@pytest.mark.parametrize(
    ("address", "rendered"),
    [
        ("oci://host:5000/models/{model_name}:{checkpoint}", "oci://host:5000/models/qwen3-4b-my-run:checkpoint-10"),
        ("hf://me/{model_name}-{export_id}", "hf://me/Qwen3-4B-my-run-e-01"),
        ("s3://bucket/{timestamp}/x", "s3://bucket/20261121_020758/x"),
        ("mlflow:plain", "mlflow:plain"),
        ("kubeflow:{model_name}@oci://host/{model_name}", "kubeflow:qwen3-4b-my-run@oci://host/qwen3-4b-my-run"),
    ],
)
def test_names_take_a_form_that_every_destination_takes(address: str, rendered: str) -> None:
    values = {**VALUES, "model_name": "..Qwen3-4B (my) run__"}
    assert render_address(address, values) == rendered
    assert render_address("oci://host/a/{model_name}", {**dict.fromkeys(PLACEHOLDERS, ""), "model_name": "é/é"}) == (
        "oci://host/a/model"
    )


REFUSED: Mapping[str, tuple[list[str], str]] = {
    "a password": (["oci://me:secretword@host/name"], "has a user in it"),
    "a placeholder": (["s3://bucket/{nonsense}"], "has an unknown placeholder"),
    "a format": (["s3://bucket/{model_name!r}"], "has an unknown placeholder"),
    "a brace": (["s3://bucket/{"], "is not a pattern"),
    "twice": (["mlflow:a", "mlflow:a"], "is named twice"),
    "nothing": ([" "], "is not an address"),
    "too many": ([f"mlflow:{number}" for number in range(17)], "are too many"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_addresses_of_no_form_are_refused(case: str) -> None:
    addresses, said = REFUSED[case]
    with pytest.raises(slipway.ConfigurationError) as caught:
        configuration(*addresses)
    assert said in str(caught.value)
    assert "output.destinations" in str(caught.value)
    assert "secretword" not in str(caught.value)


def test_a_licence_is_an_expression() -> None:
    assert configuration(license="MIT OR Apache-2.0").output.license == "MIT OR Apache-2.0"
    with pytest.raises(slipway.ConfigurationError, match=r"output\.license"):
        configuration(license="<script>")


def test_a_plan_says_what_cannot_be_published(tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    sweep = make_sweep(tmp_path / "sweep", "a", "b")
    where = {"out": tmp_path / "out", "home": tmp_path / "home", "base": sweep.parent / "base", "formats": "pytorch"}

    def settings(*addresses: str) -> dict[str, Any]:
        return {**where, "settings": {"validation.enabled": False, "output.destinations": list(addresses)}}

    good = slipway.plan(sweep / "a", **settings(f"s3://{BUCKET}/{{model_name}}"))
    assert good.require() is good
    checks = {finding.check: finding.verdict for finding in good.checked.findings}
    assert checks[f"publish: s3://{BUCKET}/{{model_name}}"] is Verdict.OK
    bad = slipway.plan(sweep / "a", **settings("s3://no-such-bucket-here/x"))
    assert not bad.possible
    with pytest.raises(slipway.ModelExportError) as caught:
        slipway.export(sweep / "a", **settings("s3://no-such-bucket-here/x"))
    assert caught.value.reason == "STORE_INVALID"
    assert not (tmp_path / "home" / "store").exists() or not any((tmp_path / "home" / "exports").glob("*"))
    assert slipway.plan([sweep / "a", sweep / "b"], **settings(f"s3://{BUCKET}/{{model_name}}")).possible
    assert slipway.plan([sweep / "a", sweep / "b"], **settings(f"s3://{BUCKET}/{{export_id}}")).possible
    with model_registry() as models:
        monkeypatch.setenv("KUBEFLOW_MODEL_REGISTRY", models.address)
        own, one = f"s3://{BUCKET}/{{model_name}}", f"s3://{BUCKET}/one"
        assert slipway.plan([sweep / "a", sweep / "b"], **settings(own, f"kubeflow:x@{own}")).possible
        for address in (one, f"s3://{BUCKET}/{{timestamp}}", f"kubeflow:{{model_name}}@{one}"):
            with pytest.raises(slipway.ConfigurationError) as clash:
                slipway.plan([sweep / "a", sweep / "b"], **settings(address))
            assert clash.value.reason == "OUTPUT_CLASH"
            assert "a, b would be published at one address" in str(clash.value)
    impossible = slipway.plan([sweep / "a", sweep / "b"], **settings("s3://no-such-bucket-here/{model_name}"))
    assert [each.error.reason for each in impossible.exports if each.error] == ["STORE_INVALID"] * 2


def test_where_it_is_published_does_not_make_another_export(tmp_path: Path) -> None:
    from slipway.exporting.preparing import export_identity

    ids = {
        export_identity(each, {"base": "sha256:" + "0" * 64}, base_match=None)
        for each in (configuration(), configuration("mlflow:a", license="MIT"), configuration("mlflow:b"))
    }
    assert len(ids) == 1


def test_secrets_of_destinations_are_not_in_a_plan(tmp_path: Path, machine: Settings) -> None:
    loaded = LoadedConfiguration(configuration(f"s3://{BUCKET}/x"), {}, ())
    assert SECRET_KEY not in str(make_plan(loaded, machine).to_json())

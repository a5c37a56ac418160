"""The commands ``publish`` and ``verify``, and every command of the page about them, in order."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from support.commands.cli import environment, in_process, slipway
from support.commands.delivered_folders import make_delivered
from support.models.tiny_models import make_base, make_checkpoint
from support.servers.registry_server import RegistryServer, needs_registry, needs_skopeo, skopeo
from support.servers.s3_server import BUCKET, S3Server

pytest.importorskip("model_signing", reason="the extra publish is not installed")

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "publishing.md").read_text(encoding="utf-8")


def test_a_folder_is_signed_and_verified(
    folder: Path, keys: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    done = in_process(capfd, "publish", folder, "--key", keys[0], "--license", "MIT", "--json", home=home)
    assert done.code == 0, done.err
    assert done.json == {
        "folder": str(folder), "export": "abc123", "success": True, "verdict": "passed", "signed": True, "files": done.json["files"], "destinations": [],
    }  # fmt: skip
    done = in_process(capfd, "verify", folder, "--key", keys[1], "--json", home=home)
    assert (done.code, done.json["verdict"], len(done.json["signed_by"])) == (0, "passed", 64)
    assert "verdict: passed; signed by the key" in in_process(capfd, "verify", folder, "--key", keys[1], home=home).out
    (folder / "onnx-int4" / "model.onnx").write_bytes(b"x")
    done = in_process(capfd, "verify", folder, "--key", keys[1], "--json", home=home)
    assert (done.code, done.json["reason"]) == (7, "ARTIFACT_CORRUPT")


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("ftp://host/x",), 3, "DESTINATION_INVALID"),
        (("--license", "<b>"), 3, "CONFIGURATION_INVALID"),
        (("--key", "absent.pem"), 3, "SIGNING_KEY_INVALID"),
        (("--key", "absent.pem", "--passphrase-file", "absent"), 3, "SIGNING_KEY_INVALID"),
    ],
)
def test_what_cannot_be_done_is_refused(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, reason: str
) -> None:
    done = in_process(capfd, "publish", folder, *words, "--json", home=tmp_path / "home")
    assert (done.code, done.json["reason"]) == (code, reason)
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("source", "code", "reason"),
    [
        ("e-0123456789abcdef01", 3, "EXPORT_NOT_FOUND"),
        ("projects/default/exports/e-0123456789abcdef01", 3, "EXPORT_NOT_FOUND"),
        ("exported/nothing", 3, "CONFIGURATION_INVALID"),
        ("../no-such-folder", 3, "CONFIGURATION_INVALID"),
        ("oci://host/name", 3, "CONFIGURATION_INVALID"),
        ("", 3, "ARTIFACT_INVALID"),
    ],
)
def test_what_is_neither_a_folder_nor_an_export_is_named(
    s3: S3Server, tmp_path: Path, capfd: pytest.CaptureFixture[str], source: str, code: int, reason: str
) -> None:
    words = ("publish", source, f"s3://{BUCKET}/nothing", "--json")
    done = in_process(capfd, *words, home=tmp_path / "home", **s3.environment())
    assert (done.code, done.json["reason"]) == (code, reason), done.out
    assert not (tmp_path / "home" / "scratch").exists()


def test_an_export_is_published_only_when_it_succeeded_and_only_to_somewhere(
    s3: S3Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its sources are missing, so it fails at once."""
    from slipway.configuration import ExportConfiguration
    from slipway.embedded.coordinator import Embedded
    from slipway.settings import Settings

    home = tmp_path / "home"
    with Embedded(Settings(home=home, scratch=home / "scratch"), "x") as embedded:
        missing = dict.fromkeys(("base", "adapter"), "sha256:" + "0" * 64)
        name = embedded.client.create_export(ExportConfiguration(), sources=missing, export_id="x").name
        list(embedded.client.watch_export(name))
        words = ("publish", "x", f"s3://{BUCKET}/x", "--json")
        running = in_process(capfd, *words, home=home, **s3.environment())
        assert (running.code, running.json["reason"]) == (7, "COORDINATOR_LOCKED")
    failed = in_process(capfd, *words, home=home, **s3.environment())
    assert (failed.code, failed.json["reason"]) == (3, "EXPORT_STATE")
    assert "is failed" in failed.json["error_message"]
    nowhere = in_process(capfd, "publish", "x", home=home)
    assert (nowhere.code, "DESTINATION" in nowhere.err) == (2, True)


def test_a_digest_has_no_signature(tmp_path: Path, keys: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    done = in_process(capfd, "verify", "sha256:" + "0" * 64, "--key", keys[1], "--json", home=tmp_path / "home")
    assert (done.code, done.json["reason"]) == (3, "SIGNATURE_MISSING")


@needs_registry
@needs_skopeo
def test_every_command_of_the_page_runs(
    registry: RegistryServer, s3: S3Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In their order, with this machine's registry and bucket in place of the page's."""
    folder = make_delivered(tmp_path / "exported" / "qwen3_20261121_020758")
    assert folder.exists()
    ran = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for name, value in {**environment(tmp_path / "home"), **s3.environment()}.items():
            patch.setenv(name, value)
        for line in re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE):
            text = line.replace("registry.example.com", registry.host).replace("s3://models", f"s3://{BUCKET}/models")
            words = shlex.split(text)
            ran.append(words[0])
            match words[0]:
                case "slipway":
                    done = in_process(capfd, *words[1:], home=tmp_path / "home")
                    assert done.code == 0, (line, done.err)
                case "skopeo":
                    flag = {"copy": "--src-tls-verify=false", "inspect": "--tls-verify=false"}[words[1]]
                    assert skopeo(words[1], flag, *words[2:])
                case "openssl" | "sha256sum":
                    subprocess.run(words, check=True, capture_output=True, cwd=tmp_path)
                case other:
                    raise AssertionError(f"{other} is not run by this test")
    assert {"slipway", "skopeo", "openssl"} <= set(ran)


@pytest.mark.slow
def test_what_an_export_delivers_is_published(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    """The documents of a real export, by the command in processes of its own."""
    schema = pytest.importorskip("cyclonedx.validation.json", reason="cyclonedx-python-lib is not installed")
    from cyclonedx.schema import SchemaVersion

    home = tmp_path / "home"
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "base", tmp_path / "run", step=5)
    words = ("--base-model", tmp_path / "base", "--out", tmp_path / "out", "-f", "pytorch:none+int8", "--json")
    exported = slipway("export", tmp_path / "run", *words, home=home)
    assert exported.code == 0, exported.err
    folder = Path(exported.json["output_directory"])
    published = slipway("publish", folder, "--key", keys[0], "--license", "MIT", "--json", home=home)
    assert (published.code, published.json["verdict"]) == (0, "passed"), published.err
    verified = slipway("verify", folder, "--key", keys[1], "--json", home=home)
    assert (verified.code, verified.json["verdict"]) == (0, "passed"), verified.err
    validator = schema.JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str((folder / "bom.cdx.json").read_text()) is None
    statement = json.loads((folder / "statement.intoto.json").read_text())["predicate"]
    outputs = {each["name"]: each for each in statement["outputs"]}
    assert outputs.keys() == {"pytorch", "pytorch-int8"}
    assert outputs["pytorch"]["faithful"]["answer"] == "passed"
    assert {each["name"] for each in statement["materials"]} >= {"base", "adapter"}
    assert slipway("export", tmp_path / "run", *words, home=home).json["output_directory"] == str(folder)

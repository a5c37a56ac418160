"""The proof beside a delivered folder: the statement, the bill of materials and the signature, and what is refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from pydantic import SecretStr

from slipway.errors import ArtifactError, ConfigurationError, ModelExportError
from slipway.files.checksums import MANIFEST, write_checksums
from slipway.publishing.publication import BOM, PROOF, SIGNATURE, STATEMENT, Publication, read_documents
from slipway.publishing.release import prepare_release
from slipway.publishing.signatures.keys import read_passphrase
from slipway.publishing.signatures.trust import TrustedKey
from slipway.publishing.statement import make_statement
from slipway.publishing.verification import check_folder
from support.commands import report_parts
from support.commands.delivered_folders import make_delivered, make_keys, write_keys

pytest.importorskip("model_signing", reason="the extra publish is not installed")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_statement_says_what_was_made_of_what(folder: Path) -> None:
    prepare_release(folder)
    statement = read(folder / STATEMENT)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    listed = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    inside = {name for name in listed if "/" in name}
    assert subjects == {name: hashlib.sha256(listed[name].read_bytes()).hexdigest() for name in inside}
    predicate = statement["predicate"]
    assert predicate["verdict"] == "passed"
    assert [each["name"] for each in predicate["outputs"]] == ["gguf-q4_k_m", "onnx-int4"]
    assert predicate["outputs"][0]["meanKl"] == 0.004
    assert predicate["outputs"][0]["limits"]["mean_kl"] == 0.02
    assert {each["name"] for each in predicate["materials"]} == {"base", "adapter", "calibration"}
    assert predicate["materials"][2 - 1]["digest"] == {"sha256": "1" * 64}
    assert predicate["tools"]["merge"]["torch"] == "2.13.0+cpu"


def test_the_bill_of_materials_is_what_the_schema_of_cyclonedx_describes(folder: Path) -> None:
    schema = pytest.importorskip("cyclonedx.validation.json", reason="cyclonedx-python-lib is not installed")
    from cyclonedx.schema import SchemaVersion

    prepare_release(folder, licence="Apache-2.0")
    validator = schema.JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str((folder / BOM).read_text()) is None
    bom = read(folder / BOM)
    model = bom["metadata"]["component"]
    assert model["licenses"] == [{"expression": "Apache-2.0"}]
    assert model["modelCard"]["modelParameters"]["datasets"] == [{"ref": "source:calibration"}]
    kinds = {each["bom-ref"]: each for each in bom["components"]}
    assert kinds["source:base"]["hashes"] == [{"alg": "SHA-256", "content": "1" * 64}]
    metrics = model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    assert ("0.004", "gguf-q4_k_m") in {(each["value"], each["slice"]) for each in metrics}
    broken = bom | {"components": [{"type": "no such type", "name": "x"}]}
    assert validator.validate_str(json.dumps(broken)) is not None


def test_a_proof_is_made_once(folder: Path, keys: tuple[Path, Path]) -> None:
    prepare_release(folder, key=keys[0], licence="MIT")
    first = {name: (folder / name).read_bytes() for name in PROOF}
    prepare_release(folder, key=keys[0])
    assert {name: (folder / name).read_bytes() for name in PROOF} == first
    checked = check_folder(folder, trusted=TrustedKey(keys[1]))
    assert checked.verdict == "passed"
    assert checked.signed_by == hashlib.sha256(keys[1].read_bytes()).hexdigest()
    assert not [path for path in folder.iterdir() if path.name.endswith(".partial")]


def test_the_signature_is_one_for_the_library_s_own_command(folder: Path, keys: tuple[Path, Path]) -> None:
    prepare_release(folder, key=keys[0])
    words = ["verify", "key", "--signature", folder / SIGNATURE, "--public_key", keys[1], folder]
    done = subprocess.run([sys.executable, "-m", "model_signing", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "gguf-q4_k_m" / "model-Q4_K_M.gguf").write_bytes(b"changed")
    done = subprocess.run([sys.executable, "-m", "model_signing", *words], capture_output=True, text=True)
    assert done.returncode == 1


def test_a_signature_by_the_library_s_own_command_is_right(folder: Path, keys: tuple[Path, Path]) -> None:
    prepare_release(folder)
    words = ["sign", "key", "--signature", folder / SIGNATURE, "--private_key", keys[0], folder]
    subprocess.run([sys.executable, "-m", "model_signing", *words], check=True, capture_output=True)
    assert check_folder(folder, trusted=TrustedKey(keys[1])).signed_by


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_an_encrypted_key_takes_its_passphrase(folder: Path, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    private, public = make_keys(tmp_path, "own", curve=curve, passphrase="a long phrase")
    (tmp_path / "phrase").write_text("a long phrase\n")
    prepare_release(folder, key=private, passphrase=read_passphrase(tmp_path / "phrase", {}))
    check_folder(folder, trusted=TrustedKey(public))
    again = make_delivered(tmp_path / "again")
    prepare_release(
        again, key=private, passphrase=read_passphrase(None, {"SLIPWAY_SIGNING_PASSPHRASE": "a long phrase"})
    )
    check_folder(again, trusted=TrustedKey(public))


@pytest.mark.parametrize("phrase", [None, "wrong"])
def test_a_wrong_passphrase_is_a_refusal(folder: Path, tmp_path: Path, phrase: str | None) -> None:
    private, _ = make_keys(tmp_path, "own", passphrase="right")
    with pytest.raises(ArtifactError) as caught:
        prepare_release(folder, key=private, passphrase=SecretStr(phrase) if phrase else None)
    assert caught.value.reason == "SIGNING_KEY_INVALID"
    assert not (folder / SIGNATURE).exists()


def _rsa(folder: Path) -> Path:
    return write_keys(folder, "rsa", rsa.generate_private_key(65537, 2048))[0]


def _other_curve(folder: Path) -> Path:
    return make_keys(folder, "k1", curve=ec.SECP256K1())[0]


def _text(folder: Path) -> Path:
    (folder / "text.pem").write_text("no key")
    return folder / "text.pem"


def _endless(_: Path) -> Path:
    return Path("/dev/zero")


@pytest.mark.parametrize("make", [_rsa, _other_curve, _text, _endless, lambda folder: folder / "absent"])
def test_what_is_no_key_is_refused(folder: Path, tmp_path: Path, make: Callable[[Path], Path]) -> None:
    key = make(tmp_path)
    with pytest.raises(ArtifactError) as caught:
        prepare_release(folder, key=key)
    assert caught.value.reason == "SIGNING_KEY_INVALID"
    prepare_release(folder, key=make_keys(tmp_path, "right")[0])
    with pytest.raises(ArtifactError) as caught:
        check_folder(folder, trusted=TrustedKey(key))
    assert caught.value.reason == "SIGNING_KEY_INVALID"


def _tamper(folder: Path) -> None:
    path = folder / "onnx-int4" / "model.onnx"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def _lose(folder: Path) -> None:
    (folder / "onnx-int4" / "tokenizer.json").unlink()


def _add(folder: Path) -> None:
    (folder / "onnx-int4" / "extra.py").write_text("x")


def _forge_report(folder: Path, **more: object) -> None:
    report = read(folder / "report.json")
    report["validation"]["outputs"][0]["to_reference"]["mean_kl"] = 1e-9
    (folder / "report.json").write_text(json.dumps(report))


def _with_checksums(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Change a folder, and then its checksums, so that they are right again."""

    def forge(folder: Path) -> None:
        kept = {name: (folder / name).read_bytes() for name in PROOF}
        for name in PROOF:
            (folder / name).unlink()
        change(folder)
        (folder / MANIFEST).unlink()
        write_checksums(folder, known={})
        for name, data in kept.items():
            (folder / name).write_bytes(data)

    return forge


def _with_statement(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """As above, and make statement and bill of materials anew too: what is left to find is the signature."""

    def forge(folder: Path) -> None:
        _with_checksums(change)(folder)
        signature = (folder / SIGNATURE).read_bytes()
        (folder / SIGNATURE).unlink()
        prepare_release(folder)
        (folder / SIGNATURE).write_bytes(signature)

    return forge


def _forge_statement(folder: Path) -> None:
    statement = read(folder / STATEMENT)
    statement["predicate"]["outputs"][0]["kept"] = 1.0
    (folder / STATEMENT).write_text(json.dumps(statement))


def _forge_bom(folder: Path) -> None:
    bom = read(folder / BOM)
    bom["components"][0]["hashes"][0]["content"] = "f" * 64
    (folder / BOM).write_text(json.dumps(bom))


def _break_statement(folder: Path) -> None:
    (folder / STATEMENT).write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("change", "reason", "name"),
    [
        (_tamper, "ARTIFACT_CORRUPT", "onnx-int4/model.onnx"),
        (_lose, "ARTIFACT_CORRUPT", "onnx-int4/tokenizer.json"),
        (_add, "ARTIFACT_CORRUPT", "onnx-int4/extra.py"),
        (_forge_report, "ARTIFACT_CORRUPT", "report.json"),
        (_forge_statement, "STATEMENT_MISMATCH", "kept"),
        (_break_statement, "STATEMENT_MISMATCH", STATEMENT),
        (_forge_bom, "STATEMENT_MISMATCH", "hashes"),
        (_with_checksums(_tamper), "STATEMENT_MISMATCH", "subject"),
        (_with_checksums(_forge_report), "STATEMENT_MISMATCH", "documents"),
        (_with_checksums(_lose), "STATEMENT_MISMATCH", "subject"),
    ],
)
def test_what_was_changed_is_found_without_a_key(
    folder: Path, keys: tuple[Path, Path], change: Callable[[Path], None], reason: str, name: str
) -> None:
    prepare_release(folder, key=keys[0])
    change(folder)
    for trusted in (None, TrustedKey(keys[1])):
        with pytest.raises(ModelExportError) as caught:
            check_folder(folder, trusted=trusted)
        assert caught.value.reason == reason
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_with_statement(_tamper), "onnx-int4/model.onnx"),
        (_with_statement(_forge_report), "report.json"),
        (_with_statement(_lose), "onnx-int4/tokenizer.json: missing"),
        (_with_statement(_add), "onnx-int4/extra.py: was not signed"),
        (lambda folder: (folder / BOM).unlink(), f"{BOM}: missing"),
        (lambda folder: (folder / STATEMENT).unlink(), f"{STATEMENT}: missing"),
    ],
)
def test_what_was_changed_with_all_that_follows_from_it_is_found_with_the_key(
    folder: Path, keys: tuple[Path, Path], change: Callable[[Path], None], name: str
) -> None:
    prepare_release(folder, key=keys[0])
    change(folder)
    check_folder(folder)
    with pytest.raises(ModelExportError) as caught:
        check_folder(folder, trusted=TrustedKey(keys[1]))
    assert caught.value.reason == "SIGNED_CONTENT_CHANGED"
    assert name in str(caught.value)


def test_another_key_did_not_sign(folder: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    prepare_release(folder, key=keys[0])
    with pytest.raises(ModelExportError) as caught:
        check_folder(folder, trusted=TrustedKey(make_keys(tmp_path, "other")[1]))
    assert caught.value.reason == "SIGNATURE_INVALID"
    (folder / SIGNATURE).unlink()
    with pytest.raises(ModelExportError) as caught:
        check_folder(folder, trusted=TrustedKey(keys[1]))
    assert caught.value.reason == "SIGNATURE_MISSING"


def _payload_changed(signature: dict[str, Any]) -> Any:
    import base64

    envelope = signature["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"]).replace(b"onnx-int4", b"onnx-int5")
    return signature | {"dsseEnvelope": envelope | {"payload": base64.b64encode(payload).decode()}}


@pytest.mark.parametrize(
    "change",
    [
        _payload_changed,
        lambda _: {},
        lambda _: [],
        lambda _: None,
        lambda signature: signature | {"mediaType": "text/plain"},
        lambda signature: signature | {"dsseEnvelope": {}},
        lambda signature: signature | {"dsseEnvelope": 5},
        lambda signature: signature | {"verificationMaterial": {"publicKey": {"hint": 7}}},
        lambda signature: signature | {"dsseEnvelope": signature["dsseEnvelope"] | {"signatures": []}},
        lambda signature: signature | {"dsseEnvelope": signature["dsseEnvelope"] | {"payload": "?"}},
    ],
)
def test_a_damaged_signature_is_refused(folder: Path, keys: tuple[Path, Path], change: Callable[[Any], Any]) -> None:
    prepare_release(folder, key=keys[0])
    (folder / SIGNATURE).write_text(json.dumps(change(read(folder / SIGNATURE))))
    with pytest.raises(ModelExportError) as caught:
        check_folder(folder, trusted=TrustedKey(keys[1]))
    assert caught.value.reason == "SIGNATURE_INVALID"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 200_000])
def test_a_signature_that_is_no_document_is_refused(folder: Path, keys: tuple[Path, Path], content: bytes) -> None:
    prepare_release(folder, key=keys[0])
    (folder / SIGNATURE).write_bytes(content)
    with pytest.raises(ModelExportError) as caught:
        check_folder(folder, trusted=TrustedKey(keys[1]))
    assert caught.value.reason == "SIGNATURE_INVALID"


def test_an_old_signature_is_not_published_with_new_files(folder: Path, keys: tuple[Path, Path]) -> None:
    prepare_release(folder, key=keys[0])
    _with_checksums(_tamper)(folder)
    with pytest.raises(ModelExportError) as caught:
        prepare_release(folder)
    assert caught.value.reason == "SIGNED_CONTENT_CHANGED"
    prepare_release(folder, key=keys[0])
    check_folder(folder, trusted=TrustedKey(keys[1]))


def test_what_failed_is_not_published(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    folder = make_delivered(tmp_path / "run", report_parts.output("onnx", 0.001), report_parts.output("gguf", 3.0))
    with pytest.raises(ModelExportError, match="gguf") as caught:
        prepare_release(folder, key=keys[0])
    assert caught.value.reason == "VALIDATION_FAILED"
    assert not any((folder / name).exists() for name in PROOF)


def test_what_could_not_run_is_incomplete(tmp_path: Path) -> None:
    folder = make_delivered(tmp_path / "run", report_parts.output("onnx", 0.001), report_parts.not_run("tensorrt"))
    prepare_release(folder)
    assert read(folder / STATEMENT)["predicate"]["verdict"] == "incomplete"
    assert check_folder(folder).verdict == "incomplete"


def test_what_was_not_made_is_said(tmp_path: Path) -> None:
    failed = {
        "tensorrt": {"task": "tensorrt", "state": "failed", "reason": "TENSORRT_BUILD_FAILED", "error_message": "x"}
    }
    folder = make_delivered(tmp_path / "run", failed=failed)
    prepare_release(folder)
    assert read(folder / STATEMENT)["predicate"]["notMade"] == {"tensorrt": "TENSORRT_BUILD_FAILED"}
    model = read(folder / BOM)["metadata"]["component"]
    said = model["modelCard"]["considerations"]["technicalLimitations"]
    assert said == ["tensorrt was not made: TENSORRT_BUILD_FAILED"]


def test_a_report_that_contradicts_itself_is_refused(folder: Path) -> None:
    report = read(folder / "report.json")
    report["result"]["formats"]["onnx-int4"]["status"] = "failed"
    (folder / "report.json").write_text(json.dumps(report))
    (folder / MANIFEST).unlink()
    write_checksums(folder, known={})
    with pytest.raises(ArtifactError) as caught:
        prepare_release(folder)
    assert caught.value.reason == "ARTIFACT_INVALID"


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("report.json", {}),
        ("report.json", {"result": {"export_id": "e", "timestamp": "yesterday", "formats": {}}}),
        ("report.json", {"result": {"export_id": "e", "timestamp": "2026-01-01T00:00:00Z", "formats": {}}}),
        ("report.json", {"result": {"export_id": "e", "timestamp": "2026-01-01T00:00:00Z", "formats": {"../x": {"digest": "sha256:" + "0" * 64, "size_bytes": 1}}}}),
        ("report.json", {"result": {"export_id": "e", "timestamp": "2026-01-01T00:00:00Z", "formats": {"onnx-int4": {"digest": "x", "size_bytes": 1}}}}),
        ("lineage.json", {"sources": {"base": "no digest"}}),
        ("lineage.json", []),
    ],
)  # fmt: skip
def test_documents_of_others_are_read_with_care(folder: Path, name: str, document: object) -> None:
    (folder / name).write_text(json.dumps(document))
    (folder / MANIFEST).unlink()
    write_checksums(folder, known={})
    with pytest.raises(ArtifactError) as caught:
        prepare_release(folder)
    assert caught.value.reason == "ARTIFACT_INVALID"
    assert "\n" not in caught.value.message


def test_a_folder_that_was_not_delivered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        prepare_release(tmp_path / "absent")
    with pytest.raises(ArtifactError) as caught:
        prepare_release(tmp_path)
    assert caught.value.reason == "ARTIFACT_INVALID"


def test_a_statement_is_the_same_every_time(folder: Path) -> None:
    publication = Publication.of(read_documents(folder), where="x")
    assert make_statement(publication) == make_statement(publication)

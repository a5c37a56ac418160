"""Delivered folders of small invented models, as ``slipway export`` writes them, and keys to sign them with."""

from __future__ import annotations

import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from slipway.files.checksums import write_checksums
from slipway.results.delivery import LINEAGE
from slipway.results.report.writing import write_report
from slipway.validation.findings import OutputValidation
from support.commands import report_parts

CREATED = {
    **report_parts.LINEAGE,
    "export_id": "abc123",
    "created": "2026-11-21T02:00:00Z",
    "sources": {**report_parts.LINEAGE["sources"], "calibration": "sha256:" + "3" * 64},
    "tools": {"slipway": "0.1.0", "python": "3.11.7", "merge": {"version": 5, "torch": "2.13.0+cpu"}},
}


def make_delivered(folder: Path, *outputs: OutputValidation, size: int = 3000, **more: object) -> Path:
    """Write a delivered folder; each output has weights of its own, and tokenizers that are the same in all.

    Args:
        folder: The new folder.
        outputs: Outputs with their verdicts; by default a GGUF file and an ONNX graph in four bits, which both passed.
        size: Bytes of the weights of an output.
        more: Fields of the result.
    """
    outputs = outputs or (report_parts.output("gguf-q4_k_m", 0.004), report_parts.output("onnx-int4", 0.002))
    for output in outputs:
        place = folder / output.name
        (place / "nested").mkdir(parents=True)
        weights = {"gguf": "model-Q4_K_M.gguf", "onnx": "model.onnx"}.get(output.format, "model.safetensors")
        (place / weights).write_bytes((output.name.encode() * (size // len(output.name) + 1))[:size])
        (place / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
        (place / "nested" / "config.json").write_text(json.dumps({"name": output.name}))
        (place / "example.py").write_text("print('hello')\n")
    report = report_parts.validation(*outputs)
    result = report_parts.result(report, tuple(output.name for output in outputs), **more)
    write_report(folder, result=result, validation=report, lineage=CREATED)
    (folder / LINEAGE).write_text(json.dumps(CREATED, indent=2, sort_keys=True) + "\n")
    write_checksums(folder, known={})
    return folder


def make_keys(
    folder: Path, name: str = "key", *, curve: ec.EllipticCurve | None = None, passphrase: str = ""
) -> tuple[Path, Path]:
    """Write a private and a public key; return both files."""
    return write_keys(folder, name, ec.generate_private_key(curve or ec.SECP256R1()), passphrase)


def write_keys(
    folder: Path,
    name: str,
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | dsa.DSAPrivateKey,
    passphrase: str = "",
) -> tuple[Path, Path]:
    encryption = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the content of each file of a folder by its path there."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

"""What a delivered folder says of itself: report, lineage and checksums, read alike from a folder and from a registry.

The proof is three more files beside the delivered ones. They are added when the folder is published, so ``MANIFEST.sha256`` does not
list them. The signature covers every file but itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict
from pydantic import ValidationError as PydanticError

from slipway.artifacts.digests import is_digest
from slipway.artifacts.manifest import check_path
from slipway.errors import ArtifactError
from slipway.files.checksums import MANIFEST, parse_checksums
from slipway.files.json_documents import LARGEST_LIST, parse_json
from slipway.files.paths import file_in
from slipway.files.regular_file import read_regular
from slipway.results.delivery import LINEAGE, REPORT
from slipway.texts import one_line, quoted, shortened
from slipway.validation.findings import OutputValidation, ValidationReport

STATEMENT, BOM, SIGNATURE = "statement.intoto.json", "bom.cdx.json", "model.sig"
"""The statement of what was made (in-toto), the bill of materials (CycloneDX), and the signature (OpenSSF Model Signing)."""
PROOF = (STATEMENT, BOM, SIGNATURE)
SOURCES = (REPORT, LINEAGE, MANIFEST)
"""Documents of a delivered folder from which the statement and the bill of materials are made."""
LARGEST_DOCUMENT = LARGEST_LIST
MOST_FILES = 20_000


class Outcome(StrEnum):
    """The verdict on all outputs of a folder."""

    PASSED = "passed"
    """Every output passed."""
    FAILED = "failed"
    """At least one output failed."""
    INCOMPLETE = "incomplete"
    """None failed, but at least one was not validated, or could not be run."""


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Format(_Read):
    digest: str
    size_bytes: int
    status: str = "not_validated"
    requested: str = ""


class _Failed(_Read):
    state: str
    reason: str = ""


class _Result(_Read):
    export_id: str
    timestamp: datetime
    formats: dict[str, _Format]
    failed: dict[str, _Failed] = {}
    base_match: dict[str, Any] | None = None


class _Report(_Read):
    result: _Result
    validation: ValidationReport | None = None


class _Lineage(_Read):
    sources: dict[str, str] = {}
    labels: dict[str, str] = {}
    tools: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class PublishedOutput:
    """One output of the folder.

    Attributes:
        name: Its name, which is that of its folder.
        digest: Its artifact in the store of the export.
        size_bytes: Size of its files.
        status: ``passed``, ``failed``, ``not_run`` or ``not_validated``.
        requested: The output that was asked for, if this one is delivered in its place; otherwise empty.
        files: Hexadecimal SHA-256 of its files, by path in the whole folder.
        validation: Its part of the validation report; None if it was not validated.
    """

    name: str
    digest: str
    size_bytes: int
    status: str
    requested: str
    files: Mapping[str, str]
    validation: OutputValidation | None


@dataclass(frozen=True, slots=True)
class Publication:
    """A delivered folder as it is published.

    Attributes:
        name: Name of the model.
        export_id: Id of the export.
        created: When the export was created (RFC 3339).
        outputs: The outputs, in the report's order.
        not_made: Reasons of the outputs that were asked for and not made, by name.
        checksums: Hexadecimal SHA-256 of every delivered file.
        sources: Digests of what the outputs were made of: ``base``, ``adapter``, ``calibration`` …
        labels: Labels of the export, such as ``base_model``.
        tools: Versions of the tools.
        base_match: Whether the adapter belongs to the base; None if that was not asked.
        validation: The validation report; None if nothing was validated.
    """

    name: str
    export_id: str
    created: str
    outputs: tuple[PublishedOutput, ...]
    not_made: Mapping[str, str]
    checksums: Mapping[str, str]
    sources: Mapping[str, str]
    labels: Mapping[str, str]
    tools: Mapping[str, Any]
    base_match: Mapping[str, Any] | None
    validation: ValidationReport | None

    @property
    def outcome(self) -> Outcome:
        """Return the verdict on all outputs."""
        statuses = {output.status for output in self.outputs}
        if "failed" in statuses:
            return Outcome.FAILED
        return Outcome.PASSED if statuses == {"passed"} else Outcome.INCOMPLETE

    @classmethod
    def of(cls, documents: Mapping[str, bytes], *, where: str) -> Self:
        """Read the documents of a delivered folder.

        Args:
            documents: Content by name, with all of :data:`SOURCES`.
            where: Where they come from, for messages.

        Raises:
            ArtifactError: ``ARTIFACT_INVALID`` if one cannot be understood, or they contradict each other.
        """
        report: _Report = _read(_Report, documents, REPORT, where)
        lineage: _Lineage = _read(_Lineage, documents, LINEAGE, where)
        try:
            checksums = parse_checksums(documents[MANIFEST], where=f"{where}/{MANIFEST}")
        except UnicodeDecodeError as error:
            raise _invalid_error(where, MANIFEST, "it is no text") from error
        _check_names(checksums, report, lineage, where)
        result = report.result
        return cls(
            name=lineage.labels.get("model_name") or "model",
            export_id=result.export_id,
            created=f"{result.timestamp.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
            outputs=tuple(_outputs(report, checksums, where)),
            not_made={name: each.reason or each.state for name, each in result.failed.items()},
            checksums=checksums,
            sources=lineage.sources,
            labels=lineage.labels,
            tools=lineage.tools,
            base_match=result.base_match,
            validation=report.validation,
        )


def read_documents(folder: Path) -> dict[str, bytes]:
    """Read the documents that a folder has: those of a delivery, and of its proof what is there.

    Raises:
        ArtifactError: ``ARTIFACT_INVALID`` if it is no delivered folder, ``FILE_ERROR``, ``LINK_OUTSIDE``.
    """
    documents = {}
    for name in (*SOURCES, *PROOF):
        try:
            path = file_in(folder, name)
            if path is not None:
                documents[name] = read_regular(path, largest=LARGEST_DOCUMENT)
        except OSError as error:
            raise ArtifactError(
                f"{folder / name} cannot be read: {error.strerror or error}",
                reason="FILE_ERROR",
                about={"file": folder / name},
            ) from error
    check_delivered(documents, where=str(folder))
    return documents


def check_delivered(documents: Mapping[str, bytes], *, where: str) -> None:
    """Refuse a place that lacks a document of a delivery.

    Raises:
        ArtifactError: ``ARTIFACT_INVALID``.
    """
    lacking = [name for name in SOURCES if name not in documents]
    if lacking:
        raise ArtifactError(
            f"{where} has no {lacking[0]}, so nothing says what is in it",
            reason="ARTIFACT_INVALID",
            remedy="name the folder that slipway export delivered, whole",
            about={"folder": where},
        )


def _read(kind: type[Any], documents: Mapping[str, bytes], name: str, where: str) -> Any:
    try:
        return kind.model_validate(parse_json(documents[name], most_values=LARGEST_DOCUMENT // 16))
    except PydanticError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise _invalid_error(where, name, f"{place}: {first['msg']}") from error
    except ValueError as error:
        raise _invalid_error(where, name, str(error)) from error


def _check_names(checksums: Mapping[str, str], report: _Report, lineage: _Lineage, where: str) -> None:
    """Refuse names that are no paths of a delivered folder, and digests that are none."""
    if len(checksums) > MOST_FILES:
        raise _invalid_error(where, MANIFEST, f"it lists more than {MOST_FILES} files")
    for name in checksums:
        check_path(name)
        if name in PROOF:
            raise _invalid_error(where, MANIFEST, f"it lists {name}, which is added by slipway publish")
    for name, each in report.result.formats.items():
        check_path(name)
        if "/" in name:
            raise _invalid_error(where, REPORT, f"{quoted(name)} is no name of an output")
        if not is_digest(each.digest):
            raise _invalid_error(where, REPORT, f"{quoted(each.digest)} is no digest")
    for digest in lineage.sources.values():
        if not is_digest(digest):
            raise _invalid_error(where, LINEAGE, f"{quoted(digest)} is no digest")


def _outputs(report: _Report, checksums: Mapping[str, str], where: str) -> Iterator[PublishedOutput]:
    outputs = report.validation.outputs if report.validation else ()
    validated = {output.name: output for output in outputs}
    if not report.result.formats:
        raise _invalid_error(where, REPORT, "it has no output")
    for name, each in report.result.formats.items():
        files = {path: digest for path, digest in checksums.items() if path.startswith(f"{name}/")}
        if not files:
            raise _invalid_error(where, MANIFEST, f"it lists no file of the output {quoted(name)}")
        validation = validated.get(name)
        status = validation.status.value if validation else "not_validated"
        if each.status != status:
            raise _invalid_error(where, REPORT, f"{name} is {quoted(each.status)} in one place, {status} in another")
        yield PublishedOutput(name, each.digest, each.size_bytes, status, each.requested, files, validation)


def _invalid_error(where: str, name: str, what: str) -> ArtifactError:
    return ArtifactError(
        f"{where}/{name} is not a document of a delivered folder: {shortened(one_line(what))}",
        reason="ARTIFACT_INVALID",
        remedy="deliver the export again with the same slipway export command into another folder",
        about={"folder": where, "file": name},
    )

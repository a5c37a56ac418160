"""Publish what an export has delivered at the destinations of its configuration, and check before the work that this is possible.

The delivery is never lost: a destination that fails makes the result a failed one, with the delivered folder in it, and the same export
again publishes what is missing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from slipway.configuration import ExportConfiguration, render_address
from slipway.configuration.values import PLACEHOLDERS
from slipway.errors import Failure, ModelExportError, with_remedy
from slipway.exporting.interruption import Interruption
from slipway.machine.known_faults import translate_fault
from slipway.planning.preflight import Finding, Verdict
from slipway.progress.observer import Observer
from slipway.publishing.destination import Access, Published
from slipway.publishing.publisher import publish_each, reach_destination
from slipway.publishing.release import OnBytes, prepare_release
from slipway.publishing.signatures.keys import read_passphrase
from slipway.publishing.signatures.signing import SigningCertificate, check_key, signing_certificate
from slipway.results.result import ExportResult, PublishedResult
from slipway.settings import Settings
from slipway.sizes import format_size

CHECK_PATIENCE_SECONDS = 10.0
"""How long an unavailable destination is waited for before the work; after it, it is waited for as long as usual."""
_INTERVAL_SECONDS = 0.2
_STAND_INS = dict.fromkeys(PLACEHOLDERS, "model")
"""Names of a model that is not known yet: every name takes the same form in an address."""

Reached = MutableMapping[str, "tuple[Finding, ...]"]
"""What was found about addresses, so that several exports ask each destination once."""


def check_destinations(
    configuration: ExportConfiguration, settings: Settings, reached: Reached | None = None
) -> list[Finding]:
    """Check that every destination can be reached and takes the credentials, and that the signing key can be used.

    Args:
        configuration: The export's configuration.
        settings: Settings of this machine.
        reached: What was found before; it is added to.
    """
    addresses, known = configuration.output.destinations, {} if reached is None else reached
    findings = _check_signing_key(settings) if addresses else []
    for address in addresses:
        if address not in known:
            known[address] = (_reach(address, settings),)
        findings += known[address]
    return findings


def require_destinations(
    configuration: ExportConfiguration, settings: Settings, reached: Reached | None = None
) -> None:
    """Refuse an export that could not be published.

    Raises:
        ModelExportError: The first error of :func:`check_destinations`.
    """
    for finding in check_destinations(configuration, settings, reached):
        if finding.verdict is Verdict.ERROR:
            message = f"{finding.check}: {finding.message}"
            raise ModelExportError(message, reason=finding.reason, remedy=finding.remedy)


@dataclass(frozen=True)
class Publisher:
    """Publishes the results of one export.

    Attributes:
        configuration: The export's configuration.
        settings: Settings of this machine.
        observer: Receives the progress.
        interruption: Ends the work from another thread.
    """

    configuration: ExportConfiguration
    settings: Settings
    observer: Observer
    interruption: Interruption

    def publish(self, result: ExportResult, values: Mapping[str, str]) -> ExportResult:
        """Publish a delivered result at every destination of the configuration; return it with what was published where.

        Args:
            result: The result; one that failed is published nowhere.
            values: Values of the placeholders.

        Raises:
            StageError: ``CANCELLED``.
        """
        addresses = [render_address(each, values) for each in self.configuration.output.destinations]
        if not result.success:
            said = f"published nowhere, because {_why_not(result)}"
            self.observer.log(logging.WARNING, said)
            return result.model_copy(update={"warnings": (*result.warnings, said)})
        outcomes = self._publish(Path(result.output_directory), addresses)
        self.observer.note("")
        return _with_outcomes(result, outcomes)

    def _publish(self, folder: Path, addresses: list[str]) -> dict[str, Published | ModelExportError]:
        access, key = Access(self.settings, os.environ), self.settings.signing_key
        self.observer.note(f"publishing {folder}")
        try:
            release = prepare_release(
                folder,
                key=key,
                passphrase=read_passphrase(None, os.environ) if key else None,
                certificate=_certificate(self.settings),
                licence=self.configuration.output.license,
                on_bytes=lambda _: self.interruption.check(),
            )
            return publish_each(release, addresses, access=access, show=self._show, check=self.interruption.check)
        except (ModelExportError, OSError) as error:
            self.interruption.check()
            fault = translate_fault(error)
            assert fault is not None
            return dict.fromkeys(addresses, fault)

    def _show(self, address: str, total: int) -> OnBytes:
        return _Counter(address, total, self.observer, self.interruption).add


class _Counter:
    """Counts the bytes that were sent, and tells a few times a second; several threads may call it."""

    def __init__(self, address: str, total: int, observer: Observer, interruption: Interruption) -> None:
        self._address, self._total = address, total
        self._observer, self._interruption = observer, interruption
        self._lock, self._done, self._told = threading.Lock(), 0, 0.0

    def add(self, size: int) -> None:
        """Add the size of a piece."""
        self._interruption.check()
        with self._lock:
            self._done += size
            now, done = time.monotonic(), min(self._done, self._total)
            if now - self._told < _INTERVAL_SECONDS and done < self._total:
                return
            self._told = now
        share = f"{done / max(self._total, 1):.0%} of {format_size(self._total)}"
        self._observer.note(f"publishing at {self._address}: {share}")


def _check_signing_key(settings: Settings) -> list[Finding]:
    try:
        certificate = _certificate(settings)
        if settings.signing_key is None:
            return []
        check_key(settings.signing_key, read_passphrase(None, os.environ), certificate)
    except ModelExportError as error:
        return [Finding("publish: signing key", Verdict.ERROR, error.message, error.remedy, error.reason)]
    return [Finding("publish: signing key", Verdict.OK, f"{settings.signing_key} signs")]


def _certificate(settings: Settings) -> SigningCertificate | None:
    """Return the certificate that this machine signs with.

    Raises:
        ConfigurationError: It is named without its key.
    """
    file, chain = settings.signing_certificate, settings.signing_certificate_chain
    return signing_certificate(file, chain, key=settings.signing_key)


def _reach(address: str, settings: Settings) -> Finding:
    check = f"publish: {address}"
    access = Access(settings, os.environ, patience_seconds=CHECK_PATIENCE_SECONDS)
    try:
        reach_destination(render_address(address, _STAND_INS), access)
    except ModelExportError as error:
        remedy = f"{error.remedy}; or export without it (output.destinations), and publish later with slipway publish"
        return Finding(check, Verdict.ERROR, error.message, remedy.removeprefix("; "), error.reason)
    return Finding(check, Verdict.OK, "it is there, and takes the credentials")


def _why_not(result: ExportResult) -> str:
    """Name the outputs for which an export is not published."""
    failed = [name for name, made in result.formats.items() if made.status == "failed"]
    if failed:
        return f"{', '.join(failed)} failed validation"
    if result.failed:
        return f"{', '.join(result.failed)} {'was' if len(result.failed) == 1 else 'were'} not made"
    return f"the export failed: {result.reason}"


def _with_outcomes(result: ExportResult, outcomes: Mapping[str, Published | ModelExportError]) -> ExportResult:
    published, failures, lines = [], list[Failure](), list[str]()
    for address, outcome in outcomes.items():
        if isinstance(outcome, Published):
            done = PublishedResult(
                destination=address,
                address=outcome.address,
                sent_bytes=outcome.sent_bytes,
                kept_bytes=outcome.kept_bytes,
                details=dict(outcome.details),
            )
            published.append(done)
            continue
        failure = outcome.failure()
        failures.append(failure)
        lines.append(f"not published at {address}: {failure.message}")
        published.append(PublishedResult(destination=address, reason=failure.reason, error_message=str(failure)))
    deciding = Failure.deciding(failures)
    if deciding is None:
        return result.model_copy(update={"published": tuple(published)})
    remedies = dict.fromkeys(failure.remedy for failure in failures if failure.remedy)
    again = "export again to publish what is missing"
    said = with_remedy("\n".join([f"delivered to {result.output_directory}", *lines]), "; ".join([*remedies, again]))
    changes = {"success": False, "reason": deciding.reason, "error_message": said}
    return result.model_copy(update={"published": tuple(published), **changes})

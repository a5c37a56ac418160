"""The work of an export: store the sources, run and watch it, deliver the outputs and return the result. It prints nothing."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING

import pydantic

from slipway.artifacts import Artifacts
from slipway.configuration import ExportConfiguration, LoadedConfiguration, render_name
from slipway.distribution import require
from slipway.errors import ArtifactError, ModelExportError
from slipway.export_sources.discovery import Sources
from slipway.export_sources.naming import sources_to_import
from slipway.exporting.interruption import InterruptibleObserver, Interruption
from slipway.exporting.opening import artifacts_at
from slipway.exporting.preparing import Prepared, prepare_sources
from slipway.observability.telemetry import span
from slipway.planning.plan import plan
from slipway.planning.preflight import Verdict, preflight
from slipway.planning.references import VALIDATION
from slipway.progress.observer import Observer
from slipway.results.delivery import check_target, deliver, lineage
from slipway.results.outcome import delivered_formats, export_id, export_result
from slipway.results.report import main_file, write_report
from slipway.results.result import ExportResult
from slipway.rpc.values import ENDED_STATES
from slipway.settings import Settings
from slipway.sources import SourceFolders
from slipway.validation.findings import ValidationReport
from slipway_protos.v1 import export_pb2 as pb

if TYPE_CHECKING:
    from slipway.client import Client


_LOST = ("ARTIFACT_NOT_FOUND", "ARTIFACT_CORRUPT")


@dataclass
class ExportJob:
    """One run of an export.

    Attributes:
        loaded: The configuration with its warnings.
        settings: Settings of this machine; without a coordinator, everything runs inside this process.
        observer: Receives the progress.
        bring_sources: Send sources from buckets and the hub too, instead of letting a worker import them.
        request_id: Name of the request to the coordinator.
        interruption: Ends the export from another thread. What has finished is kept, and the same export continues with it.
    """

    loaded: LoadedConfiguration
    settings: Settings
    observer: Observer
    bring_sources: bool = False
    request_id: str = ""
    interruption: Interruption = field(default_factory=Interruption)

    def run(self) -> ExportResult:
        """Run the export and return its result, even if the export failed.

        Raises:
            ModelExportError: There is no result, for example because a source is missing.
        """
        configuration = self.configuration
        attributes = {"slipway.checkpoint": configuration.checkpoint.path}
        with ExitStack() as stack:
            stack.enter_context(span("export", attributes=attributes, kind="client"))
            store = stack.enter_context(artifacts_at(self.settings.coordinator, self.settings))
            folders = stack.enter_context(SourceFolders(self.settings, store))
            prepared = self._prepare(folders, store)
            warnings = tuple(dict.fromkeys((*self.loaded.warnings, *prepared.warnings)))
            if not self.settings.coordinator:
                stack.enter_context(self.interruption.turn(self.observer.note))
            delivered = self._deliver_again(prepared, store, warnings)
            if delivered is not None:
                return delivered
            self.observer.note("starting")
            client = stack.enter_context(self._client(prepared.identity))
            export = self._carry_out(client, prepared)
            try:
                return self._deliver(export, store, warnings)
            except ModelExportError as error:
                if error.reason not in _LOST:
                    raise
                self.observer.log(logging.WARNING, f"{error.message}: making it again")
            client.delete_export(export.name)
            return self._deliver(self._carry_out(client, prepared), store, warnings)

    def _deliver_again(self, prepared: Prepared, store: Artifacts, warnings: tuple[str, ...]) -> ExportResult | None:
        """Deliver an export that has succeeded on this machine before; None if none has, or if its artifacts are lost.

        Its record is read from its file, because starting a coordinator and a worker would take most of the time.
        """
        if self.settings.coordinator:
            return None
        from slipway.embedded.local_exports import succeeded_export

        with succeeded_export(self.settings, prepared.identity) as export:
            if export is None:
                return None
            self._check_target(export)
            self.observer.event(pb.ExportEvent(export=export))
            try:
                return self._deliver(export, store, warnings)
            except ModelExportError as error:
                if error.reason not in _LOST:
                    raise
        return None

    def _prepare(self, folders: SourceFolders, store: Artifacts) -> Prepared:
        imports = sources_to_import(self.configuration) if self.settings.coordinator and not self.bring_sources else {}
        return prepare_sources(
            self.loaded,
            folders,
            store,
            self.observer,
            imports=imports,
            request_id=self.request_id,
            check=self._preflight,
        )

    def _preflight(self, sources: Sources) -> list[str]:
        """Check the plan against this machine before it starts; return the warnings.

        Raises:
            ModelExportError: The export cannot succeed.
        """
        checked = preflight(
            plan(self.configuration, sources.files(), source_formats=sources.formats),
            base=sources.base,
            adapter=sources.checkpoint.path if sources.checkpoint else None,
            config=sources.config,
            sections=dict(self.configuration.formats),
            home=self.settings.home,
            output=Path(self.configuration.output.directory),
            here=not self.settings.coordinator,
        )
        error = checked.error()
        if error is not None:
            raise error
        self.observer.expect(checked.task_seconds or {})
        return [str(finding) for finding in checked.findings if finding.verdict is Verdict.WARNING]

    @property
    def configuration(self) -> ExportConfiguration:
        """Return the settings of the export."""
        return self.loaded.configuration

    @contextlib.contextmanager
    def _client(self, identity: str) -> Iterator[Client]:
        """Yield a client of the coordinator, or of one inside this process."""
        if self.settings.coordinator:
            with self._remote() as client:
                yield client
            return
        from slipway.embedded.coordinator import Embedded

        with Embedded(self.settings, identity) as embedded:
            yield embedded.client

    def _carry_out(self, client: Client, prepared: Prepared) -> pb.Export:
        """Create the export, or continue the existing one, and watch it to its end."""
        name = prepared.identity
        try:
            with self.interruption.ending(client.close):
                export = client.create_export(
                    self.configuration,
                    sources=prepared.digests,
                    labels=prepared.labels,
                    export_id=prepared.identity,
                    source_formats=prepared.formats,
                    request_id=prepared.request_id,
                )
                name = export.name
                self._check_target(export)
                if export.state in (pb.EXPORT_STATE_FAILED, pb.EXPORT_STATE_CANCELLED):
                    export = client.retry_export(name)
                self.observer.note("")
                self.observer.event(pb.ExportEvent(export=export))
                return self._watch(client, export)
        except BaseException as error:
            interrupted = self.interruption.requested or isinstance(error, KeyboardInterrupt)
            if self.settings.coordinator and name and interrupted:
                with contextlib.suppress(ModelExportError), self._remote() as another:  # the first may be closed
                    another.cancel_export(name)
            raise

    def _remote(self) -> Client:
        """Return a client of the named coordinator."""
        from slipway.client import Client

        return Client(self.settings.coordinator, security=self.settings.security, project=self.settings.project)

    def _watch(self, client: Client, export: pb.Export) -> pb.Export:
        if export.state in ENDED_STATES:
            return export
        for event in client.watch_export(export.name):
            self.observer.event(event)
            if event.WhichOneof("event") == "export":
                named, export = bool(export.labels.get("model_name")), event.export
                if not named:
                    self._check_target(export)
                if export.state in ENDED_STATES:
                    break
        return export if export.state in ENDED_STATES else client.get_export(export.name)

    def _deliver(self, export: pb.Export, store: Artifacts, warnings: tuple[str, ...]) -> ExportResult:
        validation = _validation(export, store)
        if not delivered_formats(export):
            return export_result(export, store=store, validation=validation, warnings=warnings)
        target = self._target(export)
        report, missing = main_file()
        result = export_result(
            export,
            store=store,
            validation=validation,
            output_directory=target,
            report=report,
            warnings=(*warnings, *missing),
        )
        self.observer.note(f"delivering to {target}")

        def describe(folder: Path) -> None:
            write_report(folder, result=result, validation=validation, lineage=lineage(export))

        deliver(export, target, store=store, describe=describe, on_bytes=lambda _: self.interruption.check())
        self.observer.note("")
        return result

    def _check_target(self, export: pb.Export) -> None:
        """Check that the output may be written, as soon as its name is known; it may depend on a worker's import."""
        if export.labels.get("model_name"):
            check_target(self._target(export), export_id(export))

    def _target(self, export: pb.Export) -> Path:
        """Return the output directory. Its timestamp is the export's creation, so that a resumed export finds it again."""
        output = self.configuration.output
        values = {
            "model_name": export.labels["model_name"],
            "checkpoint": export.labels.get("checkpoint") or export.labels["model_name"],
            "export_id": export.name.rpartition("/")[2],
            "timestamp": f"{export.create_time.ToDatetime(UTC):%Y%m%d_%H%M%S}",
        }
        return Path(output.directory) / render_name(output.naming_pattern, values)


def _validation(export: pb.Export, store: Artifacts) -> ValidationReport | None:
    """Read the validation report; None if validation did not run."""
    digest = export.outputs.get(VALIDATION, "")
    if not digest:
        return None
    with tempfile.TemporaryDirectory(prefix="slipway-validation-") as scratch:
        folder = store.fetch(digest, Path(scratch) / VALIDATION)
        try:
            return ValidationReport.read(folder)
        except (OSError, pydantic.ValidationError) as error:
            raise ArtifactError(
                f"the stored validation report {digest} was written by another version of Slipway",
                reason="ARTIFACT_INVALID",
                remedy="use a new SLIPWAY_HOME, or remove it from the store: slipway cache gc --older-than 0s",
            ) from error


def run_export(
    loaded: LoadedConfiguration,
    settings: Settings,
    observer: Observer,
    *,
    bring_sources: bool = False,
    request_id: str = "",
    interruption: Interruption | None = None,
) -> ExportResult:
    """Run an export to its end and return its result, even if the export failed. Arguments are those of :class:`ExportJob`.

    Raises:
        ModelExportError: There is no result: a source is missing, the machine cannot make the outputs, or it was interrupted.
    """
    if not settings.coordinator:
        require(
            *("coordinator", "worker", "report"),
            what="slipway export without a coordinator",
            install="all",
            otherwise="name a coordinator: --coordinator HOST:PORT",
        )
    interruption = interruption or Interruption()
    job = ExportJob(
        loaded,
        settings,
        InterruptibleObserver(observer, interruption),
        bring_sources=bring_sources,
        request_id=request_id,
        interruption=interruption,
    )
    try:
        return job.run()
    except Exception:
        interruption.check()  # its error may be an OSError, which reading and delivering retell as a fault of files
        raise

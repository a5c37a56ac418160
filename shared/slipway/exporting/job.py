"""The work of an export: store the sources, run and watch it, deliver the outputs and return the result. It prints nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slipway.artifacts import Artifacts
from slipway.configuration import ExportConfiguration, LoadedConfiguration
from slipway.contracts.engine import PULL
from slipway.distribution import require
from slipway.errors import ModelExportError
from slipway.export_sources.discovery import Sources
from slipway.export_sources.naming import sources_to_import
from slipway.exporting.interruption import InterruptibleObserver, Interruption
from slipway.exporting.opening import artifacts_at
from slipway.exporting.preparing import Prepared, prepare_sources
from slipway.observability.telemetry import span
from slipway.planning.plan import plan
from slipway.planning.preflight import Verdict, preflight
from slipway.progress.observer import Observer
from slipway.results.delivery import check_target, deliver, lineage, naming_values, output_directory
from slipway.results.outcome import delivered_formats, export_id, export_result
from slipway.results.report import main_file, write_report
from slipway.results.result import ExportResult
from slipway.results.stored import stored_validation
from slipway.rpc.values import ENDED_STATES
from slipway.settings import Settings
from slipway.sources import SourceFolders
from slipway.sources.folders import StoredFiles
from slipway_protos.v1 import export_pb2 as pb

if TYPE_CHECKING:
    from slipway.client import Client


_LOST = ("ARTIFACT_NOT_FOUND", "ARTIFACT_CORRUPT")


@dataclass(frozen=True)
class Submitted:
    """An export that a coordinator has, and what was prepared for it."""

    prepared: Prepared
    export: pb.Export


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
        stored: Sources that this process has stored before.
        destinations_checked: Whether it was checked before that the result can be published.
    """

    loaded: LoadedConfiguration
    settings: Settings
    observer: Observer
    bring_sources: bool = False
    request_id: str = ""
    interruption: Interruption = field(default_factory=Interruption)
    stored: StoredFiles = field(default_factory=StoredFiles)
    destinations_checked: bool = False

    def run(self) -> ExportResult:
        """Run the export and return its result, even if the export failed.

        Raises:
            ModelExportError: There is no result, for example because a source is missing.
        """
        if self.configuration.output.destinations and not self.destinations_checked:
            from slipway.exporting.destinations import require_destinations

            self.observer.note("asking the places to publish to")
            require_destinations(self.configuration, self.settings)
        if self.settings.engine and not self.settings.coordinator:
            from slipway.embedded.engine_side import check_engine

            check_engine(self.settings)
        with ExitStack() as stack:
            stack.enter_context(self._span())
            store = stack.enter_context(artifacts_at(self.settings.coordinator, self.settings))
            folders = stack.enter_context(SourceFolders(self.settings, store, stored=self.stored))
            prepared = self._prepare(folders, store)
            if not self.settings.coordinator:
                stack.enter_context(self.interruption.turn(self.observer.note))
            delivered = self._deliver_again(prepared, store)
            if delivered is not None:
                return delivered
            self.observer.note("starting")
            client = stack.enter_context(self._client(prepared.identity))
            return self.finish(client, store, self._create(client, prepared))

    def submit(self, client: Client, store: Artifacts) -> Submitted:
        """Store the sources and create the export at a coordinator, or find the one that exists.

        Raises:
            ModelExportError: It cannot be created.
        """
        with self._span(), SourceFolders(self.settings, store, stored=self.stored) as folders:
            return self._create(client, self._prepare(folders, store))

    def finish(self, client: Client, store: Artifacts, submitted: Submitted) -> ExportResult:
        """Watch an export to its end, and deliver it; make it again if its artifacts are lost.

        Raises:
            ModelExportError: There is no result.
        """
        prepared = submitted.prepared
        try:
            return self._deliver(self._watch(client, submitted), store, prepared)
        except ModelExportError as error:
            if error.reason not in _LOST:
                raise
            self.observer.log(logging.WARNING, f"{error.message}: making it again")
        client.delete_export(submitted.export.name)
        return self._deliver(self._watch(client, self._create(client, prepared)), store, prepared)

    def _span(self) -> contextlib.AbstractContextManager[object]:
        return span("export", attributes={"slipway.checkpoint": self.configuration.checkpoint.path}, kind="client")

    def _deliver_again(self, prepared: Prepared, store: Artifacts) -> ExportResult | None:
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
                return self._deliver(export, store, prepared)
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
            plan(
                self.configuration,
                sources.files(),
                source_formats=sources.formats,
                weight_bytes=sources.weight_bytes,
            ),
            base=sources.base,
            adapter=sources.checkpoint.path if sources.checkpoint else None,
            config=sources.config,
            sections=dict(self.configuration.formats),
            home=self.settings.home,
            output=Path(self.configuration.output.directory),
            here=not self.settings.coordinator and self.settings.engine in {"", PULL},
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

    def _create(self, client: Client, prepared: Prepared) -> Submitted:
        """Create the export, or continue the existing one."""
        with self._cancelling(client, prepared.identity) as cancelled:
            export = client.create_export(
                self.configuration,
                sources=prepared.digests,
                labels=prepared.labels,
                export_id=prepared.identity,
                source_formats=prepared.formats,
                request_id=prepared.request_id,
            )
            cancelled.append(export.name)
            self._check_target(export)
            if export.state in (pb.EXPORT_STATE_FAILED, pb.EXPORT_STATE_CANCELLED):
                export = client.retry_export(export.name)
            self.observer.note("")
            self.observer.event(pb.ExportEvent(export=export))
            return Submitted(prepared, export)

    @contextlib.contextmanager
    def _cancelling(self, client: Client, name: str) -> Iterator[list[str]]:
        """Cancel the export at the coordinator if the block is interrupted; its name is the last in the list that is yielded."""
        names = [name]
        try:
            with self.interruption.ending(client.close):
                yield names
        except BaseException as error:
            if self.interruption.requested or isinstance(error, KeyboardInterrupt):
                with contextlib.suppress(ModelExportError):
                    self.cancel(names[-1])
            raise

    def cancel(self, name: str) -> None:
        """Cancel an export at the named coordinator, if there is one; the export may have ended.

        Raises:
            ModelExportError: The coordinator refuses, or is away.
        """
        if self.settings.coordinator and name:
            with self._remote() as another:  # the first client may be closed
                another.cancel_export(name)

    def _remote(self) -> Client:
        """Return a client of the named coordinator."""
        from slipway.client import Client

        return Client(self.settings.coordinator, security=self.settings.security, project=self.settings.project)

    def _watch(self, client: Client, submitted: Submitted) -> pb.Export:
        """Watch an export to its end."""
        export = submitted.export
        if export.state in ENDED_STATES:
            return export
        with self._cancelling(client, export.name):
            for event in client.watch_export(export.name):
                self.observer.event(event)
                if event.WhichOneof("event") == "export":
                    named, export = bool(export.labels.get("model_name")), event.export
                    if not named:
                        self._check_target(export)
                    if export.state in ENDED_STATES:
                        break
            return export if export.state in ENDED_STATES else client.get_export(export.name)

    def _deliver(self, export: pb.Export, store: Artifacts, prepared: Prepared) -> ExportResult:
        warnings = tuple(dict.fromkeys((*self.loaded.warnings, *prepared.warnings)))
        validation = stored_validation(export, store)
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
        if not self.configuration.output.destinations:
            return result
        from slipway.exporting.destinations import Publisher

        publisher = Publisher(self.configuration, self.settings, self.observer, self.interruption)
        return publisher.publish(result, naming_values(export))

    def _check_target(self, export: pb.Export) -> None:
        """Check that the output may be written, as soon as its name is known; it may depend on a worker's import."""
        if export.labels.get("model_name"):
            check_target(self._target(export), export_id(export))

    def _target(self, export: pb.Export) -> Path:
        """Return the output directory. Its timestamp is the export's creation, so that a resumed export finds it again."""
        return output_directory(export, self.configuration.output)


def require_installed(settings: Settings) -> None:
    """Refuse an export without a coordinator where the libraries for one are missing.

    Raises:
        ConfigurationError: A library is missing; the remedy says how to install it.
    """
    if not settings.coordinator:
        require(
            *("coordinator", "worker", "report"),
            what="slipway export without a coordinator",
            install="all",
            otherwise="name a coordinator: --coordinator HOST:PORT",
        )


def run_export(
    loaded: LoadedConfiguration,
    settings: Settings,
    observer: Observer,
    *,
    bring_sources: bool = False,
    request_id: str = "",
    interruption: Interruption | None = None,
    stored: StoredFiles | None = None,
    destinations_checked: bool = False,
) -> ExportResult:
    """Run an export to its end and return its result, even if the export failed. Arguments are those of :class:`ExportJob`.

    Raises:
        ModelExportError: There is no result: a source is missing, the machine cannot make the outputs, or it was interrupted.
    """
    require_installed(settings)
    interruption = interruption or Interruption()
    job = ExportJob(
        loaded,
        settings,
        InterruptibleObserver(observer, interruption),
        bring_sources=bring_sources,
        request_id=request_id,
        interruption=interruption,
        stored=stored or StoredFiles(),
        destinations_checked=destinations_checked,
    )
    try:
        return job.run()
    except Exception:
        interruption.check()  # its error may be an OSError, which reading and delivering retell as a fault of files
        raise

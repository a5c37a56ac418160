"""The functions of ``slipway`` for programs: what the commands ``export``, ``plan``, ``recommend`` and ``verify`` do.

Given a list of runs, they export or plan all of them with the same arguments. The names of their arguments are those of the command's
flags. Settings come from where the command reads them: a configuration,
``EXPORT_*`` variables and then the arguments; settings of the machine come from ``SLIPWAY_*`` variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack, overload

from slipway.advice.for_target import load_configuration
from slipway.advice.recommendation import Recommendation, recommend_outputs
from slipway.configuration import ExportConfiguration, LoadedConfiguration
from slipway.errors import ConfigurationError
from slipway.exporting.batches.planned import BatchPlan, plan_batch
from slipway.exporting.batches.result import BatchResult
from slipway.exporting.batches.running import Batch
from slipway.exporting.batches.subjects import Subject, subjects_of
from slipway.exporting.interruption import Interruption, quiet_log
from slipway.exporting.job import run_export
from slipway.exporting.observing import OnProgress, Opened, observing, observing_several
from slipway.exporting.planned import ExportPlan, make_plan
from slipway.exporting.verification import Verification, verify_path
from slipway.files.paths import user_path
from slipway.observability.telemetry import tracing
from slipway.progress.observer import Observer
from slipway.publishing.signatures.trust import trusted_signer
from slipway.results.result import ExportResult
from slipway.settings import Settings
from slipway.settings.problems import size_of
from slipway.settings.security import Security

Place = str | os.PathLike[str]
SomePlace = TypeVar("SomePlace", bound=Place)
Places = list[SomePlace] | tuple[SomePlace, ...]


class PlanOptions(TypedDict, total=False):
    """The arguments of :func:`plan` after its first."""

    configuration: Place | Mapping[str, Any] | ExportConfiguration | LoadedConfiguration | None
    base: Place | None
    formats: str | Iterable[str]
    target: str | None
    out: Place | None
    layers: str | Iterable[int] | None
    settings: Mapping[str, Any] | None
    coordinator: str | None
    project: str | None
    security: Security | None
    home: Place | None


class ExportOptions(PlanOptions, total=False):
    """The arguments of :func:`export` after its first."""

    bring_sources: bool
    request_id: str
    progress: bool | OnProgress


@overload
def export(run: Place | None = None, **options: Unpack[ExportOptions]) -> ExportResult: ...


@overload
def export(run: Places[SomePlace], **options: Unpack[ExportOptions]) -> BatchResult: ...


def export(
    run: Place | Sequence[Place] | None = None,
    *,
    configuration: Place | Mapping[str, Any] | ExportConfiguration | LoadedConfiguration | None = None,
    base: Place | None = None,
    formats: str | Iterable[str] = (),
    target: str | None = None,
    out: Place | None = None,
    layers: str | Iterable[int] | None = None,
    settings: Mapping[str, Any] | None = None,
    coordinator: str | None = None,
    project: str | None = None,
    security: Security | None = None,
    home: Place | None = None,
    bring_sources: bool = False,
    request_id: str = "",
    progress: bool | OnProgress = False,
) -> ExportResult | BatchResult:
    """Merge, quantize, export and validate a fine-tuned checkpoint; deliver the models and a report. The same call again continues.

    An export with outputs that failed is returned, with ``success`` false; :meth:`ExportResult.require` raises for it. Ctrl-C, and an
    error in ``progress``, end the export within seconds, and the next call continues it. Exports of one process that run inside it
    take turns. Nothing is printed, and no signal handler is changed.

    A list of runs is exported with the same arguments, and returns a sequence of results. All are checked before the first begins, one
    that fails does not end the others, and they share what they have in common.

    Args:
        run: Training run or one checkpoint: a folder, ``s3://…`` or a digest. None takes it from the configuration, or exports ``base``
            as it is. Or a list of them, in which the folder of a whole model is exported as it is.
        configuration: YAML file, its contents as nested plain data, or a configuration. In place of a file, ``EXPORT_*`` variables are
            not read either.
        base: Base model: a folder, an id in the local cache, ``s3://…``, ``hf://…`` or a digest (``--base-model``).
        formats: The formats to make, and no others, as after ``-f``: ``"gguf:q4_k_m"`` or ``["pytorch", "onnx:none+int8"]``.
        target: Where the model shall run; chooses the format if none is named.
        out: Folder that receives the export's own folder.
        layers: Layers whose activations exported graphs return: numbers from 0, ``"last"`` or ``"all"``.
        settings: Any settings by their keys, as ``--set``: ``{"optimization.quantization": "int8"}``.
        coordinator: ``HOST:PORT``; by default ``SLIPWAY_COORDINATOR``, and without one the export runs in this process.
        project: Project at the coordinator; by default ``SLIPWAY_PROJECT``.
        security: Certificates and token for the coordinator; by default from ``SLIPWAY_*`` variables.
        home: Folder of the artifact store and of unfinished exports; by default ``SLIPWAY_HOME``.
        bring_sources: With a coordinator, read ``s3://…`` and ``hf://…`` here and send them.
        request_id: With a coordinator, name of this request; repeating it returns the export made before.
        progress: True shows bars: in a notebook, on a terminal, or else lines on standard error. A function is called with an
            :class:`ExportProgress` after every change; calls do not overlap, but some come from threads that read files.

    Raises:
        ConfigurationError: All problems of the settings at once.
        ModelExportError: There is no result, for example because a source is missing or this machine lacks a library.
    """
    interruption = Interruption()
    options = PlanOptions(
        configuration=configuration,
        base=base,
        formats=formats,
        target=target,
        out=out,
        layers=layers,
        settings=settings,
        coordinator=coordinator,
        project=project,
        security=security,
        home=home,
    )
    if run is None or isinstance(run, str | os.PathLike):
        with observing(progress, interruption) as observer:
            return export_observed(
                observer, interruption, run, options, bring_sources=bring_sources, request_id=request_id
            )
    with observing_several(progress, interruption) as opened:
        return export_several(opened, interruption, run, options, bring_sources=bring_sources, request_id=request_id)


def export_several(
    opened: Opened,
    interruption: Interruption,
    runs: Sequence[Place],
    options: PlanOptions,
    *,
    bring_sources: bool = False,
    request_id: str = "",
) -> BatchResult:
    """Run :func:`export` for a list of runs, each with an observer of its own."""
    machine = _machine(**options)
    with quiet_log(), tracing(machine):
        made = _plan_several(runs, machine, options, bring_sources=bring_sources)
        batch = Batch(
            made, machine, opened, bring_sources=bring_sources, request_id=request_id, interruption=interruption
        )
        return batch.run()


def _plan_several(
    runs: Sequence[Place], machine: Settings, options: PlanOptions, *, bring_sources: bool = False
) -> BatchPlan:
    subjects = subjects_of(runs)
    return plan_batch(subjects, (), lambda each: _load(None, each, **options), machine, bring_sources=bring_sources)


def export_observed(
    observer: Observer,
    interruption: Interruption,
    run: Place | None,
    options: PlanOptions,
    *,
    bring_sources: bool = False,
    request_id: str = "",
) -> ExportResult:
    """Run :func:`export` with an observer, until it ends or is interrupted."""
    loaded, machine = _load(run, **options), _machine(**options)
    with quiet_log(), tracing(machine):
        return run_export(
            loaded,
            machine,
            observer,
            bring_sources=bring_sources,
            request_id=request_id,
            interruption=interruption,
        )


@overload
def plan(run: Place | None = None, **options: Unpack[PlanOptions]) -> ExportPlan: ...


@overload
def plan(run: Places[SomePlace], **options: Unpack[PlanOptions]) -> BatchPlan: ...


def plan(
    run: Place | Sequence[Place] | None = None,
    *,
    configuration: Place | Mapping[str, Any] | ExportConfiguration | LoadedConfiguration | None = None,
    base: Place | None = None,
    formats: str | Iterable[str] = (),
    target: str | None = None,
    out: Place | None = None,
    layers: str | Iterable[int] | None = None,
    settings: Mapping[str, Any] | None = None,
    coordinator: str | None = None,
    project: str | None = None,
    security: Security | None = None,
    home: Place | None = None,
) -> ExportPlan | BatchPlan:
    """Return what :func:`export` with the same arguments would do, and whether this machine can; run and write nothing.

    What makes the export impossible is among the checks of the plan; :meth:`ExportPlan.require` raises it.

    Args:
        run: As for :func:`export`, and so are the others.
        configuration: YAML file, its contents, or a configuration.
        base: Base model.
        formats: The formats to make.
        target: Where the model shall run.
        out: Folder that would receive the export's own folder.
        layers: Layers whose activations exported graphs return.
        settings: Any settings by their keys.
        coordinator: ``HOST:PORT``.
        project: Project at the coordinator.
        security: Certificates and token for the coordinator.
        home: Folder of the artifact store.

    Raises:
        ConfigurationError: All problems of the settings at once.
    """
    options = PlanOptions(
        configuration=configuration,
        base=base,
        formats=formats,
        target=target,
        out=out,
        layers=layers,
        settings=settings,
        coordinator=coordinator,
        project=project,
        security=security,
        home=home,
    )
    with quiet_log():
        if run is None or isinstance(run, str | os.PathLike):
            return make_plan(_load(run, **options), _machine(**options))
        return _plan_several(run, _machine(**options), options)


def recommend(
    target: str, *, model: Place | None = None, memory: int | str | None = None, report: Place | None = None
) -> Recommendation:
    """Recommend a format and level for a target, with the configuration that makes it.

    Args:
        target: Where the model shall run: ``cpu-server``, ``nvidia``, ``apple``, ``android``, ``browser``, ``edge``, ``llama.cpp`` (or
            ``ollama``), ``vllm``.
        model: The model, for sizes: a folder, or an id in the local cache.
        memory: Memory that the target has for it: bytes, or a text such as ``"8GiB"``.
        report: An earlier export or its ``report.json``, for measured figures.

    Raises:
        ConfigurationError: The target or the memory is not valid; ``TARGET_UNFIT``: nothing installed fits.
        ModelExportError: The model or the report cannot be read.
    """
    limit = size_of("memory", memory) if isinstance(memory, str) else memory
    measured = None if report is None else user_path(os.fspath(report))
    with quiet_log():
        return recommend_outputs(target, model=_text(model) or "", memory=limit, report=measured)


def verify(
    path: Place,
    *,
    key: Place | None = None,
    certificate_chain: Place | None = None,
    identity: str | None = None,
    identity_provider: str | None = None,
    trusted_root: Place | None = None,
    coordinator: str | None = None,
    project: str | None = None,
    security: Security | None = None,
    home: Place | None = None,
) -> Verification:
    """Compare every file of an output directory, a pulled artifact, or an artifact in the store with its checksum.

    Args:
        path: The folder, the artifact's digest (``sha256:…``), or the address of a published model (``oci://…``, ``hf://…``).
        key: File of the public key that must have signed the folder or the published model; without it and without what follows, no
            signature is checked.
        certificate_chain: File of the roots, in PEM, to which the certificate that signed must lead.
        identity: Identity of Sigstore that must have signed: an address of mail, or the URL of a workflow.
        identity_provider: URL of the OpenID Connect provider that told the identity.
        trusted_root: File of the Sigstore instance's trusted root, with ``identity``.
        coordinator: ``HOST:PORT`` of the coordinator that has the artifact; by default ``SLIPWAY_COORDINATOR``, and without one it is
            in the store of this machine.
        project: Project at the coordinator.
        security: Certificates and token for the coordinator.
        home: Folder of the artifact store.

    Raises:
        ArtifactError: ``ARTIFACT_CORRUPT`` with every file that differs, ``ARTIFACT_NOT_FOUND``, ``ARTIFACT_INVALID``,
            ``SIGNATURE_MISSING``, ``SIGNING_KEY_INVALID``, ``TRUST_ROOT_INVALID``.
        ConfigurationError: More than one of key, certificates and identity is given, or an identity in part.
        ValidationError: ``STATEMENT_MISMATCH``; if it must be signed, also ``SIGNATURE_INVALID``, ``SIGNED_CONTENT_CHANGED``,
            ``CERTIFICATE_UNTRUSTED``, ``CERTIFICATE_EXPIRED``, ``CERTIFICATE_UNFIT``, ``VALIDATION_FAILED``.
    """
    make_settings = partial(_machine, coordinator=coordinator, project=project, security=security, home=home)
    with quiet_log():
        key, roots, root = (
            None if each is None else user_path(os.fspath(each)) for each in (key, certificate_chain, trusted_root)
        )
        trusted = trusted_signer(key=key, roots=roots, identity=identity, provider=identity_provider, trusted_root=root)
        return verify_path(str(user_path(os.fspath(path))), make_settings, trusted=trusted)


def _load(run: Place | None, subject: Subject | None = None, **options: Unpack[PlanOptions]) -> LoadedConfiguration:
    """Load the settings as the command does, from a file, variables and flags.

    Raises:
        ConfigurationError: All problems at once.
    """
    given, formats = options.get("configuration"), options.get("formats") or ()
    name = subject.path if subject else _text(run)
    if name is not None and name.endswith((".yaml", ".yml")):
        raise ConfigurationError(
            f"{name} is a configuration, and the first argument is the folder of a training run",
            remedy=f"write configuration={name!r}",
            about={"key": "run"},
        )
    from_file = given is None or isinstance(given, str | os.PathLike)
    flags = {
        "RUN": name,
        "--base-model": _text(options.get("base")),
        "--target": options.get("target"),
        "--out": _text(options.get("out")),
        "--layers": _layers(options.get("layers")),
    }
    return load_configuration(
        user_path(os.fspath(given)) if isinstance(given, str | os.PathLike) else given,
        environment=os.environ if from_file else {},
        flags=subject.flags({**flags, "RUN": None}) if subject else flags,
        assignments=options.get("settings") or {},
        requested=_words(formats),
    )


def _machine(**options: Unpack[PlanOptions]) -> Settings:
    """Return the settings of this machine: those of its variables, with what is given in place of some.

    Raises:
        ConfigurationError: A variable has an impossible value.
    """
    home = _text(options.get("home"))
    machine = Settings.from_environment({**os.environ, **({} if home is None else {"SLIPWAY_HOME": home})})
    given = {name: options.get(name) for name in ("coordinator", "project", "security")}
    return machine.model_copy(update={name: value for name, value in given.items() if value is not None})


def _text(place: Place | None) -> str | None:
    return None if place is None else os.fspath(place)


def _words(formats: str | Iterable[str]) -> Sequence[str]:
    return [formats] if isinstance(formats, str) else list(formats)


def _layers(layers: str | Iterable[int] | None) -> str | None:
    return layers if layers is None or isinstance(layers, str) else ",".join(map(str, layers))

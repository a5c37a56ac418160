"""Whom a prompt can be put to: base, fine-tuned model and outputs of an export, each with why it cannot answer here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipway.console.place import Place, Shown
from slipway.distribution import installed_version
from slipway.errors import ServiceError
from slipway.files.json_documents import LARGEST, parse_json
from slipway.formats.registry import format_of_output, runtime_of_output
from slipway.machine.processors import first_gpu
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, ENCODER_DECODER, Family
from slipway.model.model_files import CONFIG
from slipway.registry import known_stage
from slipway.requirements import Abilities, Needs
from slipway.results.outcome import delivered_formats
from slipway.results.stored import stored_validation
from slipway.stage import Role
from slipway.validation.findings import OutputStatus
from slipway.validation.inputs import ADAPTER, input_of
from slipway.validation.questions import BASE, FINE_TUNED
from slipway_protos.v1 import export_pb2 as pb

_MADE_BY = {Role.PREPARATION: BASE, Role.COMBINATION: ADAPTER}
"""Stages whose output takes the place of a source."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A model that can be asked.

    Attributes:
        name: Its name.
        digest: Its artifact; empty for base and fine-tuned model.
        obstacle: Why it cannot answer here; empty if it can.
    """

    name: str
    digest: str = ""
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Choices:
    """The models of an export.

    Attributes:
        sources: Artifacts of base and adapter.
        models: The models.
        obstacle: Why none of them can be asked; empty if they can.
    """

    sources: Mapping[str, str]
    models: tuple[Choice, ...] = ()
    obstacle: str = ""

    def inputs(self, names: tuple[str, ...]) -> dict[str, str]:
        """Return the artifacts that these models are made of, by the names of a stage's inputs.

        Raises:
            ServiceError: ``REQUEST_INVALID`` for one that cannot answer here.
        """
        known = {each.name: each for each in self.models}
        for name in names:
            why = known[name].obstacle if name in known else "the export has no such output"
            if why:
                raise ServiceError(
                    f"{name} cannot be asked: {why}", reason="REQUEST_INVALID", remedy="choose among the others"
                )
        chosen = {input_of(name): known[name].digest for name in names if known[name].digest}
        return {**self.sources, **chosen}


def choices_of(place: Place, shown: Shown) -> Choices:
    """Return whom a prompt can be put to.

    Raises:
        ServiceError: ``EXPORT_STATE`` before the end.
        ArtifactError: What the export has made cannot be read.
    """
    message = shown.message
    if message is None or not shown.is_ended:
        raise ServiceError("the export has not ended", reason="EXPORT_STATE", remedy="wait for its end")
    sources = model_digests(message)
    if BASE not in sources:
        return Choices(sources, obstacle="the export has no base model")
    family = _configuration(place, shown.entry.project, sources[BASE]).family
    if family not in (DECODER, ENCODER_DECODER):
        what = f"a {family.name} cannot" if family is not None else "a model of unknown family cannot"
        return Choices(sources, obstacle=f"{what} be asked: it reads no text, or writes none")
    named = (BASE, FINE_TUNED) if ADAPTER in sources else (BASE,)
    return Choices(sources, (*map(Choice, named), *_outputs(place, shown, message, family)))


def model_digests(message: pb.Export) -> dict[str, str]:
    """Return the artifacts of the base and the adapter with which an export was made, by name: prepared and combined ones, if it has them."""
    digests = {name: message.sources[name] for name in (BASE, ADAPTER) if name in message.sources}
    for task in message.tasks:
        stage = known_stage(task.stage)
        name = _MADE_BY.get(stage.role) if stage is not None and stage.role is not None else None
        if stage is not None and name is not None and stage.main_output in task.outputs:
            digests[name] = task.outputs[stage.main_output]
    return digests


def _outputs(place: Place, shown: Shown, message: pb.Export, family: Family) -> list[Choice]:
    with place.artifacts(shown.entry.project) as store:
        report = stored_validation(message, store)
    not_run = (
        {each.name: each.status_reason for each in report.outputs if each.status is OutputStatus.NOT_RUN}
        if report
        else {}
    )
    return [
        Choice(name, digest, _obstacle(name, family) or not_run.get(name, ""))
        for name, digest in delivered_formats(message).items()
    ]


def _obstacle(name: str, family: Family) -> str:
    """Return why this machine cannot run an output, as far as that is known before; empty otherwise."""
    known, runtime = format_of_output(name), runtime_of_output(name)
    if known is None:
        return "its format is not installed here"
    if runtime is None:
        return f"the format {known.name} has no runtime for its outputs"
    if runtime.families is not None and family.name not in runtime.families:
        return f"{runtime.name} runs no {family.name} here"
    if runtime.prefers is not None and not runtime.prefers.met_by(_abilities(runtime.prefers)):
        return f"it needs {runtime.prefers}"
    return ""


def _abilities(needs: Needs) -> Abilities:
    """Return what this machine has of some needs."""
    gpu = first_gpu()
    return Abilities(
        stages=frozenset(),
        gpu_architecture=gpu.architecture if gpu is not None else "",
        gpu_memory_bytes=gpu.memory_bytes if gpu is not None else 0,
        memory_bytes=needs.memory_bytes,
        libraries={name: installed_version(name) for name in needs.libraries},
    )


def _configuration(place: Place, project: str, digest: str) -> ModelConfig:
    """Return a stored model's configuration; an empty one if it has none that can be read."""
    with place.artifacts(project) as store:
        files = store.manifest(digest).files
    file = next((each for each in files if each.path == CONFIG and each.size_bytes <= LARGEST), None)
    if file is None:
        return ModelConfig({})
    try:
        document = parse_json(b"".join(place.content(project, digest, file)), lenient=True)
    except ValueError:
        document = {}
    return ModelConfig(document if isinstance(document, dict) else {})

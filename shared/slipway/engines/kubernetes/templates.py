"""Templates of the pods that run tasks: those of Deployments of workers, which run none themselves, or of a file.

So all that a cluster wants of a pod (image, accounts, security, volumes, credentials, nodes, GPUs) is written where it is for workers that
pull. A template is for the stages that its ``--stage`` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.contracts.engine import Submission
from slipway.engines.kubernetes.states import Object
from slipway.errors import ConfigurationError
from slipway.files.yaml_files import LISTS, YamlError, load_document
from slipway.requirements import NO_GPU, Needs

LABELS = {"app.kubernetes.io/part-of": "slipway", "app.kubernetes.io/component": "worker"}
"""Labels of the Deployments of workers."""
ARCHITECTURE = "slipway.dev/gpu-architecture"
"""Annotation with the architecture of a template's GPU, such as sm89, where no label of NVIDIA's feature discovery selects it."""

TEMPLATE_FAULTS = (AttributeError, LookupError, TypeError, ValueError)
"""What an object raises that is no template."""
_MAJOR, _MINOR = "nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor"


@dataclass(frozen=True, slots=True)
class Template:
    """A template of pods.

    Attributes:
        name: Name of its Deployment or PodTemplate.
        stages: Stages that it can run.
        pod: Metadata and specification of the pod.
        gpu: Architecture of its GPU; :data:`~slipway.requirements.NO_GPU` without one, empty if it is not known.
    """

    name: str
    stages: frozenset[str]
    pod: Object
    gpu: str

    def meets(self, needs: Needs) -> bool:
        """Return whether its pods can meet needs of a GPU; of which architecture one is may be unknown."""
        return not self.gpu or needs.possible_on(self.gpu)


def choose(templates: Iterable[Template], submission: Submission) -> Template | None:
    """Return the template for a submission; None if there is none. GPUs are for those who ask for them."""
    needs = submission.requirements
    fitting = [
        one
        for one in templates
        if submission.stage in one.stages and (not needs.any_of or any(one.meets(each) for each in needs.any_of))
    ]

    def order(one: Template) -> tuple[list[bool], bool, str]:
        return [not one.meets(each) for each in needs.prefers], one.gpu != NO_GPU, one.name

    return min(fitting, key=order, default=None)


def read_templates(path: Path) -> list[Template]:
    """Return the templates of a file: a Deployment, a PodTemplate, or a list of them, as ``kubectl get -o yaml`` writes it.

    Raises:
        ConfigurationError: ``CONFIGURATION_INVALID``.
    """
    try:
        read: Any = load_document(path, limits=LISTS)
    except (OSError, YamlError) as error:
        raise _error(path, str(error)) from error
    try:
        things: list[Any] = read.get("items", [read])
        return [template_of(thing) for thing in things]
    except TEMPLATE_FAULTS as error:
        what = "it is no list of Deployments or PodTemplates with a container that has --stage"
        raise _error(path, what) from error


def template_of(thing: Object) -> Template:
    """Return the template of a Deployment or PodTemplate."""
    pod = thing["template"] if thing.get("kind") == "PodTemplate" else thing["spec"]["template"]
    container = worker_container(pod["spec"])
    stages = _stages([*(container.get("command") or ()), *(container.get("args") or ())])
    return Template(str(thing["metadata"]["name"]), frozenset(stages.split(",")), pod, _gpu(thing, pod, container))


def worker_container(spec: Object) -> Any:
    """Return the container that runs the worker: the one of this name, or the first."""
    containers = spec["containers"]
    return next((one for one in containers if one.get("name") == "worker"), containers[0])


def _stages(arguments: list[str]) -> str:
    """Return what ``--stage`` says; the last one counts."""
    found = ""
    for place, argument in enumerate(arguments):
        if argument.startswith("--stage="):
            found = argument.partition("=")[2]
        elif argument == "--stage":
            found = arguments[place + 1]
    if not found:
        raise KeyError("--stage")
    return found


def _gpu(thing: Object, pod: Object, container: Object) -> str:
    resources: Mapping[str, Any] = container.get("resources") or {}
    named = {*(resources.get("limits") or ()), *(resources.get("requests") or ())}
    if not resources.get("claims") and not any("gpu" in name or "/mig-" in name for name in named):
        return NO_GPU
    annotations = {
        **(thing["metadata"].get("annotations") or {}),
        **((pod.get("metadata") or {}).get("annotations") or {}),
    }
    if ARCHITECTURE in annotations:
        return str(annotations[ARCHITECTURE])
    selector = pod["spec"].get("nodeSelector") or {}
    return f"sm{selector[_MAJOR]}{selector[_MINOR]}" if {_MAJOR, _MINOR} <= selector.keys() else ""


def _error(path: Path, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the file of templates {path} cannot be used: {what}",
        remedy="write one with kubectl get deployments --selector app.kubernetes.io/component=worker -o yaml; docs/engines.md says more",
        about={"file": path},
    )

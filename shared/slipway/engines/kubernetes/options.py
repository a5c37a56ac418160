"""Settings of the engine, from variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TEMPLATES = "SLIPWAY_KUBERNETES_TEMPLATES"
INSTANCE = "SLIPWAY_KUBERNETES_INSTANCE"
QUEUE = "SLIPWAY_KUBERNETES_QUEUE"
PRIORITY = "SLIPWAY_KUBERNETES_PRIORITY_CLASS"


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What every Job has.

    Attributes:
        templates: File with the templates of pods (``SLIPWAY_KUBERNETES_TEMPLATES``); None for the Deployments of the namespace.
        instance: Value of the label ``app.kubernetes.io/instance`` of these Deployments, and of the Jobs, where a namespace has several
            installations (``SLIPWAY_KUBERNETES_INSTANCE``); empty if it has one.
        queue: Name of Kueue's LocalQueue, in which ``{project}`` is the export's project (``SLIPWAY_KUBERNETES_QUEUE``); empty without Kueue.
        priority_class: Name of Kueue's WorkloadPriorityClass (``SLIPWAY_KUBERNETES_PRIORITY_CLASS``); empty for none.
    """

    templates: Path | None = None
    instance: str = ""
    queue: str = ""
    priority_class: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """Labels of what belongs to this installation."""
        return {"app.kubernetes.io/instance": self.instance} if self.instance else {}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> JobOptions:
        """Read the variables."""
        templates = environment.get(TEMPLATES, "")
        return cls(
            templates=Path(templates) if templates else None,
            instance=environment.get(INSTANCE, ""),
            queue=environment.get(QUEUE, ""),
            priority_class=environment.get(PRIORITY, ""),
        )

"""Who calls: roles, and principals with the projects they may see."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ALL_PROJECTS = "*"


class Role(StrEnum):
    """What a principal is for. ``SUBMITTER`` includes ``VIEWER`` and ``OPERATOR`` both; ``WORKER`` stands apart."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    WORKER = "worker"


VIEWERS = frozenset({Role.VIEWER, Role.SUBMITTER, Role.OPERATOR})
SUBMITTERS = frozenset({Role.SUBMITTER, Role.OPERATOR})
OPERATORS = frozenset({Role.OPERATOR})
WORKERS = frozenset({Role.WORKER})
EVERYBODY = frozenset(Role)


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who calls.

    Attributes:
        name: For logs.
        roles: What it may do; several only for the owner of a private coordinator.
        projects: Projects it may see and change; ``*`` for all.
        holds_store: It has credentials of the artifact store, and so reads there whatever it knows the digest of.
    """

    name: str
    roles: frozenset[Role]
    projects: frozenset[str] = frozenset()
    holds_store: bool = False

    @property
    def may_name_any(self) -> bool:
        """Whether it may use every artifact whose digest it knows, whosever it is."""
        return self.holds_store or ALL_PROJECTS in self.projects

    def may_see(self, project: str) -> bool:
        """Return whether a project's exports are this principal's business."""
        return ALL_PROJECTS in self.projects or project in self.projects


OWNER = Principal("owner", EVERYBODY, frozenset({ALL_PROJECTS}))
"""Whoever can reach a server that only its own machine or user can reach."""

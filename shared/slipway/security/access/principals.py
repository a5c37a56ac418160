"""Roles, and principals with their projects."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ALL_PROJECTS = "*"


class Role(StrEnum):
    """Role of a principal. ``SUBMITTER`` includes ``VIEWER``, ``OPERATOR`` includes both; ``WORKER`` is separate."""

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
    """An identified caller.

    Attributes:
        name: Name for logs.
        roles: Its roles; several only for the owner of a private coordinator.
        projects: Projects it may see and change; ``*`` for all.
        holds_store: It has credentials of the artifact store, so it can read any artifact whose digest it knows.
    """

    name: str
    roles: frozenset[Role]
    projects: frozenset[str] = frozenset()
    holds_store: bool = False

    @property
    def may_name_any(self) -> bool:
        """Whether it may use every artifact whose digest it knows, of any project."""
        return self.holds_store or ALL_PROJECTS in self.projects

    def may_see(self, project: str) -> bool:
        """Return whether this principal may see a project."""
        return ALL_PROJECTS in self.projects or project in self.projects


OWNER = Principal("owner", EVERYBODY, frozenset({ALL_PROJECTS}))
"""The caller of a server that only its own machine or user can reach."""

"""What the access file grants: a role, in some projects."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict

from slipway.security.access.principals import ALL_PROJECTS

PROJECT = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
"""Name of a project."""


class Grant(BaseModel):
    """A role in some projects, for a principal or for everybody whose token has certain claims."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    role: Literal["viewer", "submitter", "operator", "worker"]
    projects: frozenset[str] = frozenset()
    holds_store: bool = False

    def check(self, who: str) -> None:
        """Refuse a role without projects, a worker with them, and impossible names.

        Raises:
            ValueError: The message names ``who``.
        """
        if self.role == "worker" and self.projects:
            raise ValueError(f"{who}: a worker works for all projects; leave out projects")
        if self.role != "worker" and not self.projects:
            raise ValueError(f'{who}: name its projects, or ["*"]')
        for project in sorted(self.projects):
            if project != ALL_PROJECTS and not PROJECT.fullmatch(project):
                raise ValueError(f"{who}: {project!r} is not the name of a project")

"""What a line of the audit log says: the names of its facts, here, at a collector, and its outcomes."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

DONE, STARTED, CHECKED, CONTENT_MISSING = "done", "started", "checked", "content_missing"
"""Outcomes other than refusals: done; a stage has started; only a plan was requested; content must be uploaded first."""

_NO_FAILURES = frozenset({DONE, STARTED, CHECKED, CONTENT_MISSING})
_PEER = re.compile(r"ipv[46]:\[?(?P<address>[^\[\]]+)\]?:(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class AuditFacts:
    """The facts of one line.

    Attributes:
        action: Name of the method.
        outcome: One of those above, or the reason of a refusal.
        principal: Name of the caller; empty if unknown.
        project: Project of the resource; empty if unknown.
        resource: Name of the affected resource; empty if unknown.
        peer: Address of the caller; empty for an action of the server itself.
        issuer: Issuer of the caller's token; empty without one.
        subject: The caller's subject there.
    """

    action: str
    outcome: str
    principal: str
    project: str
    resource: str
    peer: str = ""
    issuer: str = ""
    subject: str = ""

    def by_name(self) -> dict[str, str]:
        """Return the facts by their names in the log; without an issuer, there is neither ``issuer`` nor ``subject``."""
        return {name: value for name, value in asdict(self).items() if self.issuer or name not in ("issuer", "subject")}

    def attributes(self) -> dict[str, str | int]:
        """Return the facts by OpenTelemetry's names where it has one; what is empty is left out."""
        address = _PEER.fullmatch(self.peer)
        attributes = {
            "slipway.audit.action": self.action,
            "slipway.audit.outcome": self.outcome,
            "error.type": "" if self.outcome in _NO_FAILURES else self.outcome,
            "user.name": self.principal,
            "user.id": self.subject,
            "slipway.audit.issuer": self.issuer,
            "slipway.project": self.project,
            "slipway.resource": self.resource,
            "network.peer.address": self.peer if address is None else address["address"],
        }
        port = {} if address is None else {"network.peer.port": int(address["port"])}
        return {name: value for name, value in attributes.items() if value} | port

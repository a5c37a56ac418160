"""What a child process is to run, as its parent hands it over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipway.stage_call import Limits, StageCall


@dataclass(frozen=True, slots=True)
class Execution:
    """One attempt of one stage.

    Attributes:
        call: What to run, on folders; limits that it leaves open are those of :meth:`limits`.
        workdir: Empty folder for the outputs; the child's current folder.
        kept: Folder that outlasts the attempt, or None.
        traceparent: Span that the child's spans belong to; empty without a trace.
        environment: What the child gets instead of a stage's environment, which has neither secrets nor the network.
    """

    call: StageCall
    workdir: Path
    kept: Path | None = None
    traceparent: str = ""
    environment: Mapping[str, str] | None = None

    @property
    def limits(self) -> Limits:
        """What it may use: a single thread and 4 GiB where nobody says."""
        return self.call.limits.filled(max_memory_bytes=4 << 30, threads=1)

    def to_json(self) -> dict[str, Any]:
        """Return what the child needs to know, as JSON-ready data."""
        kept = None if self.kept is None else str(self.kept.absolute())
        call = replace(self.call, limits=self.limits).to_json()
        return {"call": call, "workdir": str(self.workdir.absolute()), "kept": kept, "traceparent": self.traceparent}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Execution:
        """Return the execution that :meth:`to_json` wrote."""
        kept = None if data["kept"] is None else Path(data["kept"])
        return cls(StageCall.from_json(data["call"]), Path(data["workdir"]), kept=kept, traceparent=data["traceparent"])

"""What a child process is to run, as its parent hands it over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from slipway.stage_call import Limits, StageCall


@dataclass(frozen=True, slots=True)
class Execution:
    """One attempt of one stage.

    Attributes:
        call: What to run, on folders; limits that it leaves open are those of :meth:`limits`.
        workdir: Empty folder for the outputs; the child's current folder.
        kept: Folder that outlasts the attempt, or None.
        traceparent: Span that the child's spans belong to; empty without a trace.
        started: When the child was started, in seconds since the epoch.
        environment: What the child gets instead of a stage's environment, which has neither secrets nor the network.
    """

    call: StageCall
    workdir: Path
    kept: Path | None = None
    traceparent: str = ""
    started: float = 0.0
    environment: Mapping[str, str] | None = None

    @property
    def limits(self) -> Limits:
        """What it may use: a single thread and 4 GiB where nobody says."""
        return self.call.limits.filled(max_memory_bytes=4 << 30, threads=1)

    def line(self) -> bytes:
        """Return what the child needs to know, as one line of JSON."""
        kept, call = self.kept and self.kept.absolute(), replace(self.call, limits=self.limits)
        known = replace(self, call=call, workdir=self.workdir.absolute(), kept=kept, environment=None)
        return _JSON.dump_json(known) + b"\n"

    @staticmethod
    def parse(line: bytes) -> Execution:
        """Return the execution that :meth:`line` wrote."""
        return _JSON.validate_json(line)


_JSON = TypeAdapter(Execution)

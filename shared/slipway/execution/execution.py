"""The message with which a parent tells its child process what to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from slipway.stage_call import Limits, StageCall


@dataclass(frozen=True, slots=True)
class Execution:
    """One attempt of one stage.

    Attributes:
        call: The stage with its parameters and input folders; :meth:`limits` fills the limits that it leaves open.
        workdir: Empty folder for the outputs; the child's current folder.
        kept: Folder that outlasts the attempt, or None.
        input_digests: Digest of each input artifact by the input's name; empty for plain folders.
        traceparent: Parent of the child's spans; empty without a trace.
        started: Start time of the child, in seconds since the epoch.
        environment: Environment of the child; None gives it a stage's environment, which has neither secrets nor the network.
    """

    call: StageCall
    workdir: Path
    kept: Path | None = None
    input_digests: Mapping[str, str] = field(default_factory=dict)
    traceparent: str = ""
    started: float = 0.0
    environment: Mapping[str, str] | None = None

    @property
    def limits(self) -> Limits:
        """Return the limits of the call; one thread and 4 GiB where it leaves them open."""
        return self.call.limits.with_defaults(max_memory_bytes=4 << 30, threads=1)

    def line(self) -> bytes:
        """Return the execution as one line of JSON for the child."""
        kept, call = self.kept and self.kept.absolute(), replace(self.call, limits=self.limits)
        known = replace(self, call=call, workdir=self.workdir.absolute(), kept=kept, environment=None)
        return _JSON.dump_json(known) + b"\n"

    @staticmethod
    def parse(line: bytes) -> Execution:
        """Return the execution that :meth:`line` wrote."""
        return _JSON.validate_json(line)


_JSON = TypeAdapter(Execution)

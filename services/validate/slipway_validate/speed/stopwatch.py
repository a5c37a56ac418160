"""Time the outputs of one validation beside the reference, whose process waits for this as long as memory allows."""

from __future__ import annotations

from functools import cached_property

from slipway.machine.cgroup import ControlGroup, available_memory
from slipway.stage import Context
from slipway.validation.speed import Speed
from slipway_validate.params import ValidateParams
from slipway_validate.protocol.messages import RunResult
from slipway_validate.protocol.process import Runner
from slipway_validate.speed.rounds import Rounds, speed_of, take_rounds

NO_REFERENCE = "timed alone: compare_outputs is off, so no reference was run"
NO_ROOM = "timed alone: this output and the reference do not fit into memory together"
QUICK = "timed alone: effort quick starts no reference for it"
REFERENCE_GONE = "timed alone: the reference's process has ended"


class Stopwatch:
    """Times one output after the other; nothing else computes during a round.

    Args:
        reference: The reference's process; None if outputs are not compared.
        params: The stage's parameters.
        ctx: The stage's context.
        model_bytes: Size of the model in float32, the largest that an output computes in.
        why: Why there is no reference to time beside.
    """

    def __init__(
        self,
        reference: Runner | None,
        params: ValidateParams,
        ctx: Context,
        *,
        model_bytes: int = 0,
        why: str = NO_REFERENCE,
    ) -> None:
        self._reference = reference
        self._params = params
        self._ctx = ctx
        self._model_bytes = model_bytes
        self._alone = "" if reference else why
        self._of_reference: list[Rounds] = []

    @cached_property
    def _result(self) -> RunResult:
        """Return the result of the reference, for which the first call waits."""
        if self._reference is None:
            return RunResult()
        found = self._reference.result
        if found.status != "done":
            self._ctx.warn(f"outputs are timed without the reference, which could not be started: {found.message}")
        return found

    @property
    def waits(self) -> bool:
        """Return whether the reference's process is still alive."""
        return self._reference is not None and self._reference.alive

    def make_room(self) -> None:
        """End the reference's process if the next output might not fit beside it."""
        memory = self._result.memory if self._reference is not None else None
        if self._reference is None or memory is None or not self.waits:
            return
        # No output needs more: it is the same model, and float32 is the widest type. The reference's own weights may be mapped.
        needed = max(memory.peak_rss_bytes, memory.baseline_rss_bytes + self._model_bytes)
        together = self._reference.anonymous_bytes() + needed
        if needed > available_memory(ControlGroup().memory()) or together > self._ctx.max_memory_bytes:
            self.release(NO_ROOM)

    def release(self, why: str) -> None:
        """End the reference's process, after timing it alone if need be; later outputs report ``why`` they are timed alone."""
        if self._reference is None or not self.waits:
            return
        self._time_reference()
        self._reference.end()
        self._alone = why

    def time(self, output: Runner) -> tuple[Speed | None, str]:
        """Time a waiting output; return its speed, or None and the reason if not even one round finished."""
        _ = self._result  # until then the reference computes something else
        if self._reference is not None and not self.waits and not self._alone:
            self._alone = REFERENCE_GONE
        reference = self._reference if self.waits else None
        taken = self._rounds(output, reference)
        if taken.reference:
            self._of_reference.append(Rounds(own=taken.reference, other_cores=taken.other_cores))
        speed = speed_of(taken, output.result, threads=self._ctx.threads)
        if speed is None:
            return None, f"its speed is unknown: {taken.note}"
        note = "; ".join(filter(None, (speed.note, "" if speed.interleaved else self._alone)))
        return speed.model_copy(update={"note": note}), ""

    def reference_speed(self) -> Speed | None:
        """Return the reference's speed over all its rounds."""
        if not self._params.benchmark_performance:
            return None
        self._time_reference()
        others = [each.other_cores for each in self._of_reference if each.other_cores is not None]
        together = Rounds(
            own=[taken for each in self._of_reference for taken in each.own],
            other_cores=sum(others) / len(others) if others else None,
        )
        return speed_of(together, self._result, threads=self._ctx.threads)

    def _time_reference(self) -> None:
        """Time the reference alone if no output was timed beside it."""
        if self._reference is not None and self.waits and not self._of_reference:
            self._of_reference.append(self._rounds(self._reference, None))

    def _rounds(self, output: Runner, reference: Runner | None) -> Rounds:
        params = self._params
        rounds = min(params.benchmark_repeats, params.evidence.most_rounds)

        def report(taken: int) -> None:
            self._ctx.progress(f"{output.label}, timing", done=taken, total=rounds, unit="rounds")

        return take_rounds(
            output,
            reference,
            rounds=rounds,
            max_seconds=params.benchmark_seconds,
            enough=params.evidence.rounds,
            on_round=report,
        )

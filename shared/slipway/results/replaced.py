"""Say which outputs were made again because of their validation: what was asked for, what is delivered, and why."""

from __future__ import annotations

from slipway.planning.references import VALIDATION
from slipway.rpc.statuses import failure_of_status
from slipway.validation.findings import REJECTED, TOO_COARSE, failed_validation, passed_with_warning
from slipway_protos.v1 import export_pb2 as pb


def requested_format(task: pb.Task) -> str:
    """Return the format for which a task was planned; it may deliver another one."""
    return str(task.requested_format or task.format)


def replacements(export: pb.Export) -> dict[str, str]:
    """Return, for each format that was made again, what was asked for, what was tried, and why."""
    found = {}
    for task in export.tasks:
        rejected = [attempt for attempt in task.attempts if _is_rejected(attempt)]
        if task.format == VALIDATION or not rejected:
            continue
        first = failure_of_status(rejected[0].error)
        output = task.format or first.about.get("output", "")  # another task converts what this one rounds
        asked = requested_format(task) or output
        tried = [f"{attempt.note} ({attempt.rule})" for attempt in task.attempts[1:] if attempt.note]
        delivered = f"delivered as {output}" if output != asked else "delivered under the same name"
        outcome = delivered if task.state == pb.TASK_STATE_SUCCEEDED else "not delivered"
        said = first.message.removeprefix(failed_validation(asked)).removeprefix(passed_with_warning(asked))
        judged = "failed validation" if first.reason == REJECTED else "passed with a warning"
        found[output] = f"{asked} {judged} ({said}) and was made again: {'; '.join(tried)}; {outcome}"
    return found


def _is_rejected(attempt: pb.Attempt) -> bool:
    return attempt.HasField("error") and failure_of_status(attempt.error).reason in (REJECTED, TOO_COARSE)

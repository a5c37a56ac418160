"""Show the formats that workers or this machine can make, the workers of a coordinator, and what waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.text import Text

from slipway.errors import Failure, StageError
from slipway.machine.doctor import stage_health
from slipway.planning.judging import validation_obstacle
from slipway.registry import stage_names
from slipway.requirements import Placement
from slipway.rpc.formats import describe_formats
from slipway.rpc.values import failure_of_status, status_of
from slipway.rpc.workers import describe_worker
from slipway.terminal.columns import Column, FittedTable, SharedHint
from slipway.terminal.console import duration, errors, print_json, show
from slipway_protos.v1 import coordinator_pb2 as pb


def local_formats() -> tuple[list[pb.Format], Failure | None]:
    """Return the installed formats with whether this machine can make them, and why it cannot judge outputs; None if it can."""
    stages = {health.name: health for health in map(stage_health, stage_names())}

    def judge(task: Placement) -> Failure | None:
        health = stages.get(task.stage)
        if health is not None and health.available:
            return None
        remedy = "install it" if health is None else health.missing
        message = f"the stage {task.stage} cannot run on this machine"
        return StageError(message, reason="UNSUPPORTED", remedy=remedy, about={"stage": task.stage}).failure()

    return [each.judged(judge) for each in describe_formats()], validation_obstacle(judge)


def print_formats(formats: Sequence[pb.Format], unjudged: Failure | None, *, as_json: bool) -> None:
    """Print formats with the reason where one cannot be made now, and why outputs cannot be judged."""
    if as_json:
        obstacle = None if unjudged is None else _document(status_of(unjudged))
        print_json({"formats": list(map(_document, formats)), "validation_obstacle": obstacle})
        return
    table = FittedTable(
        Column("format", style="bold"),
        Column("can be made"),
        Column("levels", rank=1, wrap=True),
        Column("targets", rank=3, wrap=True),
        Column("stages", rank=2, wrap=True),
        Column("why not", wrap=True),
    )
    for each in formats:
        lacking = [level for level in each.levels if not level.available]
        mark = Text("no", style="red")
        if each.available:
            mark = Text("in part", style="yellow") if lacking else Text("yes", style="green")
        reasons = [_why_not("", each), *(_why_not(level.name, level) for level in lacking)] if each.available else []
        table.add_row(
            each.name,
            mark,
            ", ".join(level.name for level in each.levels),
            ", ".join(dict.fromkeys(target.name for target in each.targets)),
            ", ".join(dict.fromkeys([*each.stages, *(stage for level in each.levels for stage in level.stages)])),
            "; ".join(dict.fromkeys(filter(None, reasons or [_why_not("", each)]))),
        )
    show(table)
    if unjudged is not None:
        errors.print(f"outputs cannot be judged, which exports wait for by default: {_text_of(unjudged)}")


def print_workers(response: pb.ListWorkersResponse, *, as_json: bool) -> None:
    """Print the workers of a coordinator and its queue."""
    if as_json:
        parts = {"workers": list(map(_document, response.workers)), "queue": list(map(_document, response.queue))}
        print_json({**parts, "hidden_workers": response.hidden_workers})
        return
    tables = _workers_table(response.workers), _queue_table(response.queue)
    shown = [table for table in tables if table.row_count]
    spaced = [part for table in shown for part in (table, Text())][:-1]
    if shown:
        show(*spaced, SharedHint(*shown))
    if not response.workers and not response.hidden_workers:
        errors.print("no workers")
    if response.hidden_workers:
        errors.print(f"workers that run nothing of your projects: {response.hidden_workers}")
    if not response.queue:
        errors.print("nothing waits")


def _workers_table(workers: Sequence[pb.Worker]) -> FittedTable:
    table = FittedTable(
        Column("worker", style="bold"),
        Column("state"),
        Column("tasks", right=True),
        Column("stages", rank=1, wrap=True),
        Column("memory of a task", rank=3, right=True),
        Column("processors", rank=5, right=True),
        Column("GPU", rank=2),
        Column("joined (UTC)", rank=4),
        hint="",
    )
    for each in sorted(workers, key=lambda worker: worker.name):
        table.add_row(*describe_worker(each), each.join_time.ToDatetime().isoformat(" ", "seconds"))
    return table


def _queue_table(queue: Sequence[pb.WaitingTasks]) -> FittedTable:
    table = FittedTable(
        Column("waiting", right=True, style="bold"),
        Column("stage"),
        Column("project"),
        Column("for", right=True),
        Column("because", wrap=True),
        hint="",
    )
    for each in queue:
        hidden = not each.project
        age = "" if hidden else duration(each.oldest_age_seconds)
        project = "of others" if hidden else each.project
        table.add_row(str(each.count), each.stage, project, age, each.detail)
    return table


def _why_not(level: str, part: pb.Format | pb.FormatLevel) -> str:
    if not part.HasField("obstacle"):
        return ""
    text = _text_of(failure_of_status(part.obstacle))
    return f"{level}: {text}" if level else text


def _text_of(failure: Failure) -> str:
    return f"{failure.message}: {failure.remedy}" if failure.remedy else failure.message


def _document(message: Message) -> dict[str, Any]:
    """Return a message with all its fields, also those that are false, 0 or empty: programs read them."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

"""What pages say of the outputs of an export, and of the differences between two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from slipway.artifacts import Artifacts
from slipway.configuration import ExportConfiguration
from slipway.console.place import Place, Shown
from slipway.errors import Failure, ModelExportError
from slipway.results.outcome import delivered_formats
from slipway.results.report import figures
from slipway.results.report.document import Report
from slipway.results.report.page import NOT_MADE, VERDICTS
from slipway.results.stored import stored_report
from slipway.rpc.messages import asked_configuration_message
from slipway.texts import shortened
from slipway_protos.v1 import export_pb2 as pb

_LONGEST_VALUE = 200
_OWN_FIELDS = ("base_model.", "checkpoint.", "formats.", "output.")


@dataclass(frozen=True, slots=True)
class Output:
    """One output in a table.

    Attributes:
        name: Its name.
        verdict: What validation says of it, or why it was not made.
        why: Why it failed, or was not made; empty if it was.
        size_bytes: Size of its files; None if it was not made.
        mean_kl: Mean KL against the fine-tuned model, nats per token; None if it was not compared.
        speed: Its speed, for people.
        digest: Its artifact; empty if it was not made.
    """

    name: str
    verdict: str
    why: str = ""
    size_bytes: int | None = None
    mean_kl: float | None = None
    speed: str = "–"
    digest: str = ""


def report_of(place: Place, shown: Shown) -> Report | None:
    """Return the report of an export; None before its record is that of one that has ended.

    Raises:
        ModelExportError: Its artifacts cannot be read.
    """
    if shown.message is None or not shown.has_report:
        return None
    with place.artifacts(shown.entry.project) as store:
        return stored_report(shown.message, store)


@dataclass(frozen=True, slots=True)
class Findings:
    """What an export has made, and what there is to say about it.

    Attributes:
        outputs: Its outputs.
        warnings: Its warnings.
        failure: Why no more is known, such as artifacts that are no longer in the store; None if all is known.
    """

    outputs: tuple[Output, ...] = ()
    warnings: tuple[str, ...] = ()
    failure: Failure | None = None


def findings_of(place: Place, shown: Shown) -> Findings:
    """Return the outputs of an export, in the plan's order, with its warnings; while it runs, what it has made so far."""
    if shown.message is None:
        return Findings()
    try:
        report = report_of(place, shown)
        if report is not None:
            return Findings(tuple(_outputs(report)), report.result.warnings)
        with place.artifacts(shown.entry.project) as store:
            return Findings(tuple(_made(shown.message, store)))
    except ModelExportError as error:
        names = delivered_formats(shown.message)
        return Findings(tuple(Output(name, "unknown") for name in names), failure=error.failure())


def _made(message: pb.Export, store: Artifacts) -> Iterator[Output]:
    for name, digest in delivered_formats(message).items():
        yield Output(name, "made", size_bytes=store.manifest(digest).distinct_bytes, digest=digest)


def _outputs(report: Report) -> Iterator[Output]:
    for name in report.names:
        made, failed = report.result.formats.get(name), report.result.failed.get(name)
        if made is None:
            assert failed is not None
            yield Output(name, NOT_MADE.get(failed.state, failed.state), failed.error_message)
            continue
        validated = report.validated(name)
        why = validated.explanation if validated is not None and made.status != "passed" else ""
        speed = figures.generation_speed(made) if made.decode_tokens_per_second else figures.prompt_speed(made)
        verdict = VERDICTS.get(made.status, made.status)
        yield Output(name, verdict, why, made.size_bytes, made.mean_kl, speed, made.digest)


def further_warnings(warnings: Iterable[str], failure: Failure | None) -> list[str]:
    """Return the warnings that say something else than the failure, which has a line for each output that failed."""
    lines = [line for line in failure.message.splitlines() if line] if failure is not None else []
    return [warning for warning in warnings if not any(line in warning for line in lines)]


def side_by_side(one: Iterable[Output], other: Iterable[Output]) -> list[tuple[str, Output | None, Output | None]]:
    """Return the outputs of two exports by name."""
    a, b = ({each.name: each for each in outputs} for outputs in (one, other))
    return [(name, a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b))]


def differences(one: pb.Export | None, other: pb.Export | None) -> list[tuple[str, str, str]]:
    """Return the settings, sources and labels in which two exports differ, by their keys."""
    a, b = (dict(_facts(message)) for message in (one, other))
    keys = dict.fromkeys((*a, *b))
    return [(key, a.get(key, "–"), b.get(key, "–")) for key in sorted(keys) if a.get(key) != b.get(key)]


def _facts(message: pb.Export | None) -> Iterator[tuple[str, str]]:
    if message is None:
        return
    yield from _flat(_as_dict(message.configuration))
    for title, values in (("source", message.sources), ("label", message.labels)):
        for name, value in values.items():
            yield f"{title} {name}", shortened(value, _LONGEST_VALUE)


def changed_settings(message: pb.Export) -> list[str]:
    """Return the plain settings of an export that are not the usual ones, as after ``--set``, without those that name its parts."""
    usual = dict(_flat(_as_dict(asked_configuration_message(ExportConfiguration()))))
    asked = _flat(_as_dict(message.configuration))
    return [
        f"{key}={value}"
        for key, value in asked
        if value and usual.get(key) != value and not key.startswith(_OWN_FIELDS) and "," not in value
    ]


def _as_dict(configuration: Message) -> dict[str, Any]:
    return MessageToDict(configuration, preserving_proto_field_name=True)


def _flat(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield f"{before}{name}", shortened(shown, _LONGEST_VALUE)

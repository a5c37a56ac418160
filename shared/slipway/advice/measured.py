"""Read what earlier exports measured of their outputs, from their reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.errors import ArtifactError
from slipway.files.json_documents import LARGEST_LIST, read_json_object

REPORT = "report.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one output on the machine that validated it; None where a figure is missing.

    Attributes:
        size_bytes: Its size.
        prefill_ms: One pass over a prompt.
        decode_tokens_per_second: Speed of generation.
        memory_mb: Peak memory while it was measured, 10^6 bytes.
        mean_kl: Divergence from the fine-tuned model, nats per token.
        status: Verdict of the validation.
    """

    size_bytes: float | None
    prefill_ms: float | None
    decode_tokens_per_second: float | None
    memory_mb: float | None
    mean_kl: float | None
    status: str


def read_measured(path: Path) -> dict[str, Measured]:
    """Read the figures of all outputs from a report, or from the folder of an export; by the names of outputs.

    Raises:
        ArtifactError: ``FILE_ERROR``: it is no report.
    """
    file = path / REPORT if path.is_dir() else path
    try:
        document = read_json_object(file, largest=LARGEST_LIST)
        formats = document["result"]["formats"]
        return {name: _parse_entry(entry) for name, entry in formats.items() if isinstance(entry, dict)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{file} is no report of an export: {str(error) or type(error).__name__}",
            reason="FILE_ERROR",
            remedy=f"name the folder of an export, or its {REPORT}",
            about={"file": file},
        ) from error


def _parse_entry(entry: dict[str, Any]) -> Measured:
    status = entry.get("status")
    return Measured(
        size_bytes=_number(entry.get("size_bytes")),
        prefill_ms=_number(entry.get("inference_speed_ms")),
        decode_tokens_per_second=_number(entry.get("decode_tokens_per_second")),
        memory_mb=_number(entry.get("memory_usage_mb")),
        mean_kl=_number(entry.get("mean_kl")),
        status=status if isinstance(status, str) else "",
    )


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None

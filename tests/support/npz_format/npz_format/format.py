"""The format ``npz``."""

from __future__ import annotations

from collections.abc import Iterable

from slipway.formats import (
    FLOAT32_BYTES,
    Format,
    FormatRequest,
    LevelSettings,
    ModelSize,
    PlannedTask,
    Problem,
    Runtime,
    SectionRules,
    Texts,
    Usage,
)


class NpzConfiguration(LevelSettings):
    """The weights as one numpy archive.

    Attributes:
        compress: Compress the archive.
        leave_out: Weights that are left out.
    """

    compress: bool = False
    leave_out: Texts = ()


def plan(request: FormatRequest[NpzConfiguration]) -> tuple[PlannedTask, ...]:
    return tuple(
        PlannedTask(
            id=f"npz_pack{level and '-'}{level}",
            stage="npz_pack",
            params={"compress": request.settings.compress, "half": level == "half"},
            inputs={"model": request.model},
            format=f"{request.name}-{level}" if level else request.name,
            output="npz",
        )
        for level in ("", *request.levels)
    )


def conflicts(settings: NpzConfiguration) -> Iterable[Problem]:
    if settings.leave_out:
        yield Problem(
            "leave_out", f"{', '.join(settings.leave_out)} cannot be left out", "set formats.npz.leave_out: []"
        )


def cautions(settings: NpzConfiguration) -> Iterable[str]:
    if settings.compress:
        yield "formats.npz.compress: a compressed archive cannot be mapped"


def output_bytes(_: NpzConfiguration, level: str, size: ModelSize) -> int:
    return size.weights * (2 if level == "half" else FLOAT32_BYTES) + size.companion_bytes


FORMAT = Format(
    name="npz",
    title="numpy archive",
    settings=NpzConfiguration,
    plan=plan,
    levels=("half",),
    rules=SectionRules(variables={"compress": "EXPORT_SQUEEZE"}, conflicts=conflicts, cautions=cautions),
    output_bytes=output_bytes,
    runtime=Runtime(name="npz", files=("weights.npz",), load="npz_format.runtime:load", precision_file="npz.json"),
    usage=Usage(template=("npz_format", "usage.example.j2"), library="numpy", packages="numpy"),
    media_types={".npz": "application/vnd.numpy-archive"},
)

"""Write the ``mmproj`` file of a model that takes images, beside the file of its text part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from slipway.model.configuration import ModelConfig
from slipway.model.safetensors_file import read_weights
from slipway.stage import Context
from slipway_gguf.diagnosis import check_file
from slipway_gguf.files import projector_name
from slipway_gguf.params import LEVELS, GGUFParams
from slipway_gguf.vision import encoder_of, seen_by, why_no_projector
from slipway_gguf.vision.entry import Encoder
from slipway_gguf.vision.plan import PlannedProjector, level_beside, plan_projector, stored_kind
from slipway_gguf.weights.header import general_fields
from slipway_gguf.weights.tensors import PlannedFile
from slipway_gguf.weights.writing import write_file


@dataclass(frozen=True, slots=True)
class Projector:
    """What a model has for images.

    Attributes:
        encoder: Its image encoder, if a file of it is written.
        planned: The file's plan, if one is written.
        why_not: Why no file is written, if the encoder is known.
        differs: What llama.cpp computes otherwise than the model; empty if nothing that matters.
        others: Names of the model's tensors that are in no file.
    """

    encoder: Encoder | None = None
    planned: PlannedProjector | None = None
    why_not: str = ""
    differs: str = ""
    others: tuple[str, ...] = ()


def plan_images(model: Path, text: PlannedFile) -> Projector:
    """Plan the ``mmproj`` file of a model, if llama.cpp computes its image encoder.

    Raises:
        GGUFExportError: As :func:`slipway_gguf.vision.plan.plan_projector`.
    """
    config = ModelConfig.read(model)
    encoder = encoder_of(config)
    if encoder is None:
        return Projector(others=text.others)
    if not text.others:
        return Projector(why_not="config.json describes an image encoder, and the model has no tensors of it")
    seen = seen_by(encoder, config, model)
    why_not = why_no_projector(encoder, seen)
    if why_not:
        return Projector(why_not=why_not, others=text.others)
    planned = plan_projector(encoder, seen, read_weights(model), text.others, hidden=text.parameters.decoder.hidden)
    differs = encoder.differs(seen) if encoder.differs else ""
    return Projector(encoder, planned, differs=differs, others=planned.others)


def write_images(folder: Path, projector: Projector, params: GGUFParams, lineage: str, ctx: Context) -> dict[str, Any]:
    """Write the planned ``mmproj`` file, check it, and return facts about it for ``gguf.json``; none if none is planned.

    Raises:
        GGUFExportError: ``NON_FINITE_WEIGHTS``, or ``GGUF_INVALID`` if the file read back differs from the model.
    """
    if projector.encoder is None or projector.planned is None:
        return {}
    encoder, planned = projector.encoder, projector.planned
    level = level_beside(LEVELS[params.type])
    general = general_fields(
        "clip", params, level, planned.tensors, experts=0, lineage=lineage, kind=gguf.GGUFType.MMPROJ
    )
    written = write_file(
        folder / projector_name(params.name, level),
        (*general, *planned.fields),
        planned.tensors,
        {each.name: stored_kind(each, level) for each in planned.tensors},
        importance={},
        threads=max(1, ctx.threads),
        on_bytes=lambda done, total: ctx.progress("images", done=done, total=total),
    )
    ctx.digest(written.path, written.sha256)
    return {
        "file": written.path.name,
        "sha256": written.sha256,
        "type": level.label,
        "projector": encoder.projector,
        "tensors": len(written.entries),
        "size": written.size,
        **check_file(written, planned.tensors),
        **({"stored_wider": list(written.widened)} if written.widened else {}),
        **({"unused": list(planned.unused)} if planned.unused else {}),
        **({"differs": projector.differs} if projector.differs else {}),
    }

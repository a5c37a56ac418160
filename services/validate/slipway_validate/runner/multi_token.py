"""Measure how often the reference accepts the drafts of its multi-token head, with and without the adapter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from slipway.errors import CheckpointValidationError
from slipway.model.folder import ModelFolder
from slipway.model.pytorch.head_updates import merged_head
from slipway.model.pytorch.multi_token import DraftingHead, HeadNotUnderstoodError, load_head
from slipway.proof.runtime import HEAD_FILE, Samples
from slipway.validation.parts import MultiTokenHead
from slipway_validate.protocol.messages import RunSpec
from slipway_validate.runner.runtime_reference import ReferenceModel

Report = Callable[[str, int, int], None]


def measure_head(model: Any, spec: RunSpec, folder: Path, *, report: Report) -> None:
    """Write what the model accepts of its head's drafts over the windows; a failure becomes the reason why nothing was measured.

    Args:
        model: The reference, prepared for the comparison.
        spec: What it runs.
        folder: Folder of its results.
        report: Called with phase, done and total.
    """
    try:
        finding = _measure(model, spec, report)
    except (HeadNotUnderstoodError, CheckpointValidationError) as error:
        finding = MultiTokenHead(not_run=str(error))
    except Exception as error:  # noqa: BLE001 - a layer of a model's own code may raise anything; the other results hold
        finding = MultiTokenHead(not_run=f"{type(error).__name__}: {error}")
    (folder / HEAD_FILE).write_text(finding.model_dump_json(), encoding="utf-8")


def _measure(model: Any, spec: RunSpec, report: Report) -> MultiTokenHead:
    if spec.by_layers:
        raise HeadNotUnderstoodError("the model is computed layer by layer, and its drafts are not")
    module = model.module
    plain = module.get_base_model() if hasattr(module, "get_base_model") else module
    tokens = torch.from_numpy(Samples.read(spec.samples).tokens)
    if tokens.shape[1] < 2:
        raise HeadNotUnderstoodError("a window has one token, after which there is nothing to draft")
    base = ModelFolder.open(spec.model)
    sides: list[tuple[ModelFolder, Any]] = []
    with merged_head(base, spec.adapter) as delivered:
        sides.append((delivered, nullcontext))
        if isinstance(model, ReferenceModel):
            sides.append((base, model.without_adapter))
        shares, heads = [], {folder.path: load_head(folder, plain) for folder, _ in sides}
        for number, (folder, side) in enumerate(sides):
            head = heads[folder.path]
            accepted, restore = 0, head.widen()
            try:
                with side():
                    for place, window in enumerate(tokens):
                        accepted += count_accepted(module, plain, head, window[None])
                        report("multi-token head", number * len(tokens) + place + 1, len(sides) * len(tokens))
            finally:
                restore()
            shares.append(accepted / _count_drafts(tokens))
    return MultiTokenHead(
        layers=heads[delivered.path].layers,
        accepted_before=shares[1] if len(shares) > 1 else None,
        accepted_after=shares[0],
        tokens=_count_drafts(tokens),
    )


def _count_drafts(tokens: torch.Tensor) -> int:
    """Return how many tokens have a draft. tokens: (N, T)."""
    return tokens.numel() - len(tokens)


@torch.no_grad()
def count_accepted(module: Any, plain: Any, head: DraftingHead, tokens: torch.Tensor) -> int:
    """Return how many drafts are the model's own first choice. tokens: (B, T), of which T - 1 have a draft.

    Args:
        module: The model, with its adapter if it has one.
        plain: transformers' model in it.
        head: Its head.
        tokens: The tokens.

    Raises:
        HeadNotUnderstoodError: Its results are not finite.
    """
    states: list[torch.Tensor] = []
    hook = plain.get_decoder().register_forward_hook(lambda *call: states.append(call[-1].last_hidden_state))
    try:
        logits = module(input_ids=tokens, use_cache=False).logits  # (B, T, V)
    finally:
        hook.remove()
    drafts = head(states[0], tokens)  # (B, T - 1, V)
    if not bool(torch.isfinite(drafts).all()):
        raise HeadNotUnderstoodError("its drafts contain NaN or infinity")
    return int((drafts.argmax(dim=-1) == logits[:, 1:].argmax(dim=-1)).sum())

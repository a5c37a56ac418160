"""Refuse a base model that lacks the head the adapter was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.errors import ModelMergeError
from slipway.models.families import QUESTION_ANSWERING, SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER, described, family_of

_HEADS = {"SEQ_CLS": SEQUENCE_CLASSIFIER, "TOKEN_CLS": TOKEN_CLASSIFIER, "QUESTION_ANS": QUESTION_ANSWERING}


def check_head(config: Mapping[str, Any], adapter: Mapping[str, Any]) -> None:
    """Refuse an adapter with a head of its own, trained on top of a base that is saved without one.

    Training adds a new head to such a base (a classifier to a BERT, a ``score`` to a Qwen3), and only the adapter has it.

    Args:
        config: ``config.json`` of the base.
        adapter: ``adapter_config.json``.

    Raises:
        ModelMergeError: ``ADAPTER_BASE_MISMATCH``.
    """
    task = adapter.get("task_type")
    wanted, found = _HEADS.get(task) if isinstance(task, str) else None, family_of(config)
    if wanted is None or found is None or found is wanted or not adapter.get("modules_to_save"):
        return
    raise ModelMergeError(
        f"the adapter was trained on a {wanted.name}, and the base is a {described(config)}, which has no such head",
        reason="ADAPTER_BASE_MISMATCH",
        remedy="save the base once with a head, and name that folder: "
        f"transformers.{wanted.auto_class}.from_pretrained(BASE, num_labels=N).save_pretrained(FOLDER); "
        "the head that was trained then comes from the adapter",
        about={"task_type": task, "architectures": config.get("architectures")},
    )

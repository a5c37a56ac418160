"""Refuse to run packages in validation: Core ML is part of Apple's systems, and validation cannot call it yet."""

from __future__ import annotations

from pathlib import Path

from slipway.proof.runtime import LanguageModel, NotRunnable


def load(folder: Path, *, threads: int) -> LanguageModel:
    """Refuse to run an output.

    Raises:
        NotRunnable: Always.
    """
    del threads
    raise NotRunnable(
        f"{folder.name} needs Core ML, which only macOS 15, iOS 18 and later have; its interface and every weight were checked when it was made"
    )

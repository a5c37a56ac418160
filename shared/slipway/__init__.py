"""From a finished LoRA training run to models that can be served, each proven to behave like the fine-tuned one.

``slipway.Client`` and ``slipway.AsyncClient`` call a coordinator; they are imported when they are first asked for, as a stage
or a configuration needs no network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipway.client import AsyncClient, Client
    from slipway.settings.security import Security

__all__ = ["AsyncClient", "Client", "Security"]

_HOMES = {"AsyncClient": "slipway.client", "Client": "slipway.client", "Security": "slipway.settings.security"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

"""Clients of a coordinator: typed messages, and :class:`ModelExportError` for every failure.

:class:`Client` blocks, :class:`AsyncClient` is for asyncio; both have the same methods.
"""

from slipway.client.asynchronous import AsyncClient
from slipway.client.blocking import Client
from slipway.client.calls import DEFAULT_PROJECT, export_name

__all__ = ["DEFAULT_PROJECT", "AsyncClient", "Client", "export_name"]

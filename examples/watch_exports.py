"""Watch several exports at once with the asynchronous client: ``python examples/watch_exports.py EXPORT [EXPORT …]``.

Address, project, token and certificates come from SLIPWAY_COORDINATOR, SLIPWAY_PROJECT, SLIPWAY_TOKEN_FILE and SLIPWAY_TLS_*.
"""

from __future__ import annotations

import asyncio
import os
import sys

import slipway
from slipway_protos.v1 import export_pb2 as pb


async def follow(client: slipway.AsyncClient, name: str) -> str:
    """Print the events of an export; return its last state."""
    state = ""
    async for event in client.watch_export(name):  # continues by itself after a restart of the coordinator
        if event.HasField("progress"):
            print(f"{name}: {event.progress.task} {event.progress.phase}")
        elif event.HasField("export"):
            state = pb.ExportState.Name(event.export.state)
            print(f"{name}: {state}")
    return state


async def main(names: list[str]) -> int:
    """Watch the exports until all have ended; return 0 if all succeeded."""
    address, project = os.environ["SLIPWAY_COORDINATOR"], os.environ.get("SLIPWAY_PROJECT") or "default"
    security = slipway.Security.from_environment(os.environ)
    async with slipway.AsyncClient(address, security=security, project=project) as client:
        states = await asyncio.gather(*(follow(client, name) for name in names))
    return int(any(state != "EXPORT_STATE_SUCCEEDED" for state in states))


if __name__ == "__main__":
    try:
        raise SystemExit(asyncio.run(main(sys.argv[1:])))
    except slipway.ModelExportError as error:  # names the problem and the remedy
        print(f"{error.reason}: {error}", file=sys.stderr)
        raise SystemExit(error.failure().exit_code) from None

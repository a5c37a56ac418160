"""A server with TLS and health alone, in a process of its own: ``python tls_server.py CERTIFICATE KEY`` prints its port and serves until it is ended."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from slipway.rpc.serving import add_health_and_reflection
from slipway.security.server import ServerSecurity
from slipway.settings.security import TlsFiles


async def serve(certificate: Path, key: Path) -> None:
    """Serve until the process is ended."""
    security = ServerSecurity(tls=TlsFiles(certificate=certificate, key=key))
    server = security.server()
    health = add_health_and_reflection(server)
    port = security.listen(server, "127.0.0.1:0")
    await server.start()
    health.set_serving(serving=True)
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))

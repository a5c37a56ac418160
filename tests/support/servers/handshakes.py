"""Many TLS connections at a time to a server in a process of its own, half of them broken, while its files are renewed."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from support.servers import tls_server
from support.servers.certificates import Authority, replace

AT_ONCE = 8
_HELLO_BEGUN = b"\x16\x03\x01"


@dataclass
class Load:
    """What became of connections.

    Attributes:
        complete: Handshakes that succeeded.
        broken: Connections that sent three bytes and closed.
        reset: Handshakes that the server ended, as at a renewal.
        certificates: Serial numbers of the certificates that the server showed.
    """

    complete: int = 0
    broken: int = 0
    reset: int = 0
    certificates: set[str] = field(default_factory=set)


@contextlib.contextmanager
def tls_process(authority: Authority) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a server with the authority's files ``server``; yield its process and port."""
    files = authority.files("server", "localhost")
    words = [sys.executable, "-P", tls_server.__file__, str(files.certificate), str(files.key)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.terminate()


def renew(authority: Authority) -> None:
    """Replace the files ``server`` by new ones."""
    folder = authority.folder
    new = authority.files("renewed", "localhost")
    assert new.certificate is not None
    assert new.key is not None
    replace(folder / "server.key", new.key.read_bytes())
    replace(folder / "server.pem", new.certificate.read_bytes())


def connect(port: int, authority: Authority, count: int, *, renewals: int) -> Load:
    """Open connections, every second one broken, with renewals in between."""
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    trusting.set_alpn_protocols(["h2"])
    load, lock, begun = Load(), threading.Lock(), iter(range(count))

    def one(number: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:
            if number % 2:
                plain.sendall(_HELLO_BEGUN)
                with lock:
                    load.broken += 1
                return
            try:
                with trusting.wrap_socket(plain, server_hostname="localhost") as whole:
                    serial = str((whole.getpeercert() or {})["serialNumber"])
            except (ConnectionError, ssl.SSLEOFError):
                with lock:
                    load.reset += 1
                return
            with lock:
                load.complete += 1
                load.certificates.add(serial)

    def many() -> None:
        while True:
            with lock:
                number = next(begun, None)
            if number is None:
                return
            if number % max(1, count // renewals) == 0:
                with lock:
                    renew(authority)
            with contextlib.suppress(ConnectionError):  # an attempt at the moment of a renewal
                one(number)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        for each in [threads.submit(many) for _ in range(AT_ONCE)]:
            each.result()
    return load

"""A TCP proxy with a changeable target whose traffic can be stopped: like a service's address, and a failing network."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

Target = tuple[str, int]

_MOST_THREADS = 256


class TcpProxy:
    """Passes connections on to the address that ``target`` returns; closes them if there is none.

    Args:
        target: Returns the address for a new connection.
        host: Address to listen on.

    Attributes:
        sent_bytes: What went to the targets.
        received_bytes: What came back.
    """

    def __init__(self, target: Callable[[], Target | None], *, host: str = "127.0.0.1") -> None:
        self._target = target
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._pairs: dict[int, tuple[Target, socket.socket, socket.socket]] = {}
        self._lock = threading.Lock()
        self.sent_bytes = self.received_bytes = 0
        self._flowing = threading.Event()
        self._flowing.set()
        self._ended = False
        # A pool: the threads of one that a wider fixture opened are not a test's.
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="tcp-proxy")

    def hold(self) -> None:
        """Stop all traffic from now on without telling either side."""
        self._flowing.clear()

    def resume(self) -> None:
        """Let all traffic pass again."""
        self._flowing.set()

    def cut(self, *, unless: Target | None = None) -> None:
        """Close the connections to every other target."""
        with self._lock:
            pairs = [pair for pair in self._pairs.values() if pair[0] != unless]
        for _, near, far in pairs:
            for each in (near, far):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._threads.submit(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._flowing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._threads.shutdown()

    def _accept(self) -> None:
        while not self._ended:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._threads.submit(self._serve, near)

    def _serve(self, near: socket.socket) -> None:
        self._flowing.wait()
        target = self._target()
        with near:
            if target is None:
                time.sleep(0.05)
                return
            try:
                far = socket.create_connection(target, timeout=2)
            except OSError:
                return
            with far:
                far.settimeout(None)
                with self._lock:
                    self._pairs[id(near)] = (target, near, far)
                if self._ended:
                    self.cut()
                back = self._threads.submit(self._pump, far, near, self._count_received)
                self._pump(near, far, self._count_sent)
                back.result()
                with self._lock:
                    del self._pairs[id(near)]

    def _count_sent(self, count: int) -> None:
        with self._lock:
            self.sent_bytes += count

    def _count_received(self, count: int) -> None:
        with self._lock:
            self.received_bytes += count

    def _pump(self, source: socket.socket, sink: socket.socket, count: Callable[[int], None]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                sink.sendall(data)
                count(len(data))
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

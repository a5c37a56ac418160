"""A test fails by name for what it leaves in its process, but not for what it takes back or a wider fixture holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path

import pytest

from support.harness import leftovers
from support.harness.unhurried import unhurried

LEAKS = {
    "logger library: level was 0, is 10": "logging.getLogger('library').setLevel(10)",
    "logger library: propagate": "logging.getLogger('library').propagate = False",
    "logger library: disabled": "logging.getLogger('library').disabled = True",
    "logger library: handlers": "logging.getLogger('library').addHandler(logging.NullHandler())",
    "logger library: filters": "logging.getLogger('library').addFilter(logging.Filter('x'))",
    "logger root: handlers": "logging.getLogger().addHandler(logging.NullHandler())",
    "logger slipway.of_this_test: level": "logging.getLogger('slipway.of_this_test').setLevel(10)",
    "logging disable": "logging.disable(10)",
    "environment variable LEFT: was nothing, is 'behind'": "os.environ['LEFT'] = 'behind'",
    "environment variable HOME": "os.environ.pop('HOME')",
    "current folder": "os.chdir('/')",
    "umask: was": "os.umask(0o027)",
    "sys path": "sys.path.append('/nowhere')",
    "sys argv": "sys.argv.append('--more')",
    "sys excepthook": "sys.excepthook = print",
    "signal handler SIGUSR1": "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    "resource limit RLIMIT_NOFILE": "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))",
    "locale": "locale.setlocale(locale.LC_ALL, 'C' if locale.setlocale(locale.LC_ALL) != 'C' else 'C.UTF-8')",
    "context variable left: was nothing, is 1": "VARIABLE.set(1)",
    "thread 'stays' of": "threading.Thread(target=time.sleep, args=(2,), name='stays').start()",
    "thread 'daemon' of": "threading.Thread(target=time.sleep, args=(2,), name='daemon', daemon=True).start()",
    "thread 'inner' of": "OUTER = threading.Thread(target=inner)\n    OUTER.start()\n    OUTER.join()",
    "process [0-9]+: sleep 6": "KEPT.append(subprocess.Popen(['sleep', '6']))",
    "process [0-9]+: sleep 5": "subprocess.run(['setsid', '--fork', 'sleep', '5'])",
    "process [0-9]+: it has ended, but nobody waited": "KEPT.append(subprocess.Popen(['true']))",
}
"""A test that leaves something behind, by the name in its failure."""

BEGINNING = """
import contextvars, locale, logging, os, resource, signal, subprocess, sys, threading, time
import pytest
VARIABLE = contextvars.ContextVar("left")
KEPT = []
logging.getLogger("library")
def inner():
    threading.Thread(target=time.sleep, args=(2,), name="inner").start()
"""

CLEAN = """
def test_imports():
    import accelerate, dbos, grpc.aio, onnx, onnxruntime, onnxscript, peft, torch, transformers

@pytest.fixture(scope="module")
def server():
    with subprocess.Popen(["sleep", "60"]) as process:
        def later():
            time.sleep(0.1)
            threading.Thread(target=process.wait, daemon=True).start()
        threading.Thread(target=later).start()
        os.environ["SERVER"] = "here"
        yield process
        del os.environ["SERVER"]
        process.kill()

def test_takes_back(server, monkeypatch, tmp_path, capsys, caplog):
    caplog.set_level(10, "library")
    monkeypatch.setenv("LEFT", "behind")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert subprocess.run(["true"]).returncode == 0

def test_ends_soon_after():
    threading.Thread(target=time.sleep, args=(0.5,)).start()
    subprocess.Popen(["sleep", "0.5"])

def test_once_more(server):
    assert os.environ["SERVER"] == "here"
    time.sleep(0.2)
    assert threading.active_count() > 1
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Run tests in a process of their own, watched for what they leave; gives pytest's output."""

    def call(text: str, *, patience: float) -> str:
        (tmp_path / "test_it.py").write_text(BEGINNING + text)
        (tmp_path / "conftest.py").write_text(
            f"from support.harness import leftovers\nleftovers.PATIENCE_SECONDS = {patience}\n"
        )
        options = "-m pytest -q -p support.harness.leftovers -p no:cacheprovider --rootdir=. test_it.py"
        command = [sys.executable, *options.split()]
        alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=alone).stdout

    return call


def test_each_thing_left_is_named(run: Callable[..., str]) -> None:
    leaks = "".join(f"def test_{number}():\n    {leak}\n" for number, leak in enumerate(LEAKS.values()))
    said = run(leaks, patience=0.5)
    failures = dict(re.findall(r"_ ERROR at teardown of test_(\d+) _+\n(.*?)(?=\n_|\n=)", said, flags=re.DOTALL))
    assert len(failures) == len(LEAKS), said
    for number, name in enumerate(LEAKS):
        left = failures[str(number)].splitlines()[1:]
        assert len(left) == 1, left  # this and nothing else
        assert re.search(name, left[0]), (name, left)


@pytest.mark.slow
def test_what_is_taken_back_or_ends_in_time_is_no_fault(run: Callable[..., str]) -> None:
    said = run(CLEAN, patience=2.0)
    assert "4 passed" in said, said
    assert "error" not in said, said


def test_a_file_system_that_stays_mounted_is_named(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = leftovers.Look.now(tmp_path)
    assert str(small_disk) in before.mounts
    monkeypatch.setattr(leftovers, "_mounts", lambda folder: before.mounts | {f"{folder}/more"})
    assert before.left_since("no test", tmp_path) == [f"mount {tmp_path}/more"]


def test_a_look_takes_few_milliseconds(tmp_path: Path) -> None:
    def look() -> None:
        assert leftovers.Look.now(tmp_path).left_since("no test", tmp_path) == []

    assert min(timeit.repeat(look, number=1, repeat=200)) < unhurried(0.004)

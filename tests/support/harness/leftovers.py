"""Fail a test that leaves something behind in its process, and name it.

A test that changes its process affects the tests after it, which then pass or fail by their order. This plugin
compares the process before and after every test and its own fixtures. Fixtures of a wider scope may keep resources open:
they are set up before the first comparison. Warning filters are not compared: pytest restores them after every test.
"""

from __future__ import annotations

import functools
import gc
import locale
import logging
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _worker
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from _pytest.logging import LogCaptureHandler

from support.commands.child_processes import Children, mark

PATIENCE_SECONDS = 10.0
"""Seconds that threads and processes may take to end."""

PERMANENT_THREADS = {
    "tqdm._monitor": "one for every progress bar there will ever be",
    "grpc._cython": "it ends when the garbage collector finds the last channel or server of grpc.aio",
}
"""Modules whose threads may outlast the test that started them, with the reason."""

LIBRARY_LOGGERS = {
    "dbos": "its first launch sets it up, for good",
    "uvicorn.error": "the coordinator's listener lets it report errors alone, once it is imported",
    "torch.__trace": "the first capture of a model replaces its handler",
    **dict.fromkeys(("mlflow", "alembic", "huey", "urllib3.connectionpool"), "mlflow sets them up when it is imported"),
}
"""Loggers that a library sets up permanently after its import, with the reason."""

LIBRARY_VARIABLES = {
    b"TORCHINDUCTOR_CACHE_DIR": "torch sets it when it imports its compiler",
    b"OPENVINO_LIB_PATH": "executorch sets it when it is imported beside openvino",
    **dict.fromkeys(
        (b"LITERT_TORCH_SHOW_PROGRESS", b"LITERT_TORCH_SILENCE_TORCH_LOGS"), "litert-torch keeps its settings there"
    ),
    **dict.fromkeys((b"TF_CPP_MIN_LOG_LEVEL", b"TPU_SKIP_MDS_QUERY"), "jax, which litert-torch imports, sets it"),
}
"""Environment variables that a library sets when it is imported, with the reason."""

LIBRARY_CONTEXT = {
    "deterministic": "torch's compiler follows whether algorithms are deterministic, which is looked at by itself",
    "torch._dynamo.config.": "torch's compiler keeps one for each of its decorators",
    "torch._inductor.config.": "torch's compiler keeps what it knows of its settings",
    **dict.fromkeys(("_BUFFER_ALIGNMENT", "_DELEGATE_ALIGNMENT"), "executorch keeps what it last wrote a program with"),
    **dict.fromkeys(
        (
            "torch._functorch.config.",
            "torch.fx.experimental._config.",
            "allow_rnn",
            "assume_static_by_default",
            "automatic_dynamic_shapes",
            "backed_size_oblivious",
            "capture_dynamic_output_shape_ops",
            "capture_scalar_outputs",
            "constant_fold_autograd_profiler_enabled",
            "decompose_custom_triton_ops",
            "do_not_emit_runtime_asserts",
            "dont_skip_tracing",
            "fake_tensor_allow_unsafe_data_ptr_access",
            "ignore_logging_functions",
            "install_free_tensors",
            "log_graph_in_out_metadata",
            "prefer_deferred_runtime_asserts_over_guards",
            "reorderable_logging_functions",
            "replay_side_effects",
            "side_effect_replay_policy",
            "specialize_float",
            "specialize_int",
            "_vt_active_calls",
        ),
        "the first capture of a model by torch.export fixes its settings",
    ),
}
"""Prefixes of context variables that a library sets after its import, with the reason."""

_FIELDS = ("level", "propagate", "disabled", "handlers", "filters")
_UNTOUCHED = (logging.NOTSET, True, False, (), ())
_SIGNALS = sorted(set(signal.Signals) - {signal.SIGALRM})  # pytest-timeout's own
_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_LIMITS.pop("RLIMIT_OFILE", None)  # another name of RLIMIT_NOFILE
_ABSENT = "nothing"
_POOLS: WeakKeyDictionary[ThreadPoolExecutor, float] = WeakKeyDictionary()
_STARTED_BY: WeakKeyDictionary[threading.Thread, threading.Thread] = WeakKeyDictionary()


def pytest_configure() -> None:
    """Mark the processes that tests start; record new pools and the starters of threads, which Python does not record."""
    mark()
    initialize, start = ThreadPoolExecutor.__init__, threading.Thread.start

    @functools.wraps(initialize)
    def noted(self: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        _POOLS[self] = time.monotonic()

    @functools.wraps(start)
    def noted_start(self: threading.Thread) -> None:
        _STARTED_BY[self] = threading.current_thread()
        start(self)

    ThreadPoolExecutor.__init__ = noted  # type: ignore[method-assign]
    threading.Thread.start = noted_start  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compare the process before and after each test: the first of a test's own fixtures, so the last to be torn down."""
    folder = tmp_path_factory.getbasetemp()
    before = Look.now(folder)
    yield
    left = before.left_since(request.node.nodeid, folder)
    if left:
        pytest.fail("this test left behind in its process:\n  " + "\n  ".join(left), pytrace=False)


@dataclass(frozen=True)
class Look:
    """The state of a process at one moment, by kind and name."""

    state: Mapping[str, Mapping[str, Any]]
    threads: frozenset[threading.Thread]
    children: Children
    mounts: frozenset[str]
    moment: float

    @classmethod
    def now(cls, folder: Path) -> Look:
        """Read the state of this process and the mounts in a folder."""
        return cls(
            state={kind: read() for kind, read in _READERS.items()},
            threads=frozenset(threading.enumerate()),
            children=Children.now(),
            mounts=_mounts(folder),
            moment=time.monotonic(),
        )

    def left_since(self, test: str, folder: Path) -> list[str]:
        """Describe what the test left: changed state, running threads and processes, mounts in the folder."""
        left = [
            _described(kind, name, before, after)
            for kind, read in _READERS.items()
            for name, before, after in _differences(self.state[kind], read())
            if not _is_excused(kind, name, before, after)
        ]
        left += self._threads()
        left += self.children.left_since(test, patience=PATIENCE_SECONDS)
        left += [f"mount {point}" for point in sorted(_mounts(folder) - self.mounts)]
        return left

    def _threads(self) -> list[str]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        left = []
        for thread in threading.enumerate():
            if thread in self.threads or self._may_stay(thread):
                continue
            if _pool(thread) is not None:
                gc.collect()  # an unused pool ends its threads when it is collected
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                left.append(f"thread {thread.name!r} of {_owner(thread)}")
        return left

    def _may_stay(self, thread: threading.Thread) -> bool:
        """Return whether a new thread is not the test's: of a library, not of Python, or of an earlier pool or thread."""
        if _owner(thread).startswith(tuple(PERMANENT_THREADS)) or isinstance(thread, threading._DummyThread):
            return True
        if any(starter in self.threads for starter in _starters(thread)):
            return True
        pool = _pool(thread)
        return pool is not None and _POOLS.get(pool, 0.0) < self.moment


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    if before == after:
        return
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name, _ABSENT), after.get(name, _ABSENT)
        if was != now:
            yield name, was, now


def _described(kind: str, name: str, before: Any, after: Any) -> str:
    if kind != "logger":
        return f"{' '.join([kind, *os.fsdecode(name).split()])}: was {_short(before)}, is {_short(after)}"
    was, now = (_UNTOUCHED if each is _ABSENT else each for each in (before, after))
    changes = [f"{field} was {a}, is {b}" for field, a, b in zip(_FIELDS, was, now, strict=True) if a != b]
    return f"logger {name}: {'; '.join(changes)}"


def _short(value: Any) -> str:
    text = value if value is _ABSENT else repr(os.fsdecode(value) if isinstance(value, bytes) else value)
    return text if len(text) < 200 else f"{text[:200]}…"


def _pool(thread: threading.Thread) -> ThreadPoolExecutor | None:
    """Return the pool of a thread: the pool of a wider fixture may start threads in any test."""
    if getattr(thread, "_target", None) is not _worker:
        return None
    pool = thread._args[0]()  # type: ignore[attr-defined]
    return pool if isinstance(pool, ThreadPoolExecutor) else None


def _starters(thread: threading.Thread) -> Iterator[threading.Thread]:
    """Return the chain of threads that started this one, without the main thread."""
    starter = _STARTED_BY.get(thread)
    while starter not in (None, threading.main_thread()):
        yield starter
        starter = _STARTED_BY.get(starter)


def _owner(thread: threading.Thread) -> str:
    """Return the module whose code runs in a thread."""
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", None) or type(thread).__module__)


def _is_excused(kind: str, name: str | bytes, before: object, after: object) -> bool:
    """Return whether a difference comes from a library's setup at its import, or is only a new logger."""
    new = before is _ABSENT
    match kind:
        case "torch":
            return new
        case "context variable":
            return new and str(name).startswith(tuple(LIBRARY_CONTEXT))
        case "environment variable":
            return new and name in LIBRARY_VARIABLES
        case "logger":
            ours = str(name).startswith("slipway")
            return name in LIBRARY_LOGGERS or (new and (after == _UNTOUCHED or not ours))
    return False


def _loggers() -> dict[str, Any]:
    loggers = {"root": logging.root, **logging.root.manager.loggerDict}
    return {name: _logger(it) for name, it in loggers.items() if isinstance(it, logging.Logger)}


def _logger(it: logging.Logger) -> tuple[Any, ...]:
    # pytest captures with handlers of its own, also those of loggers that do not propagate.
    handlers = tuple(each for each in it.handlers if not isinstance(each, LogCaptureHandler)) if it.handlers else ()
    return it.level, it.propagate, it.disabled, handlers, tuple(it.filters)


def _logging() -> dict[str, Any]:
    return {"disable": logging.root.manager.disable, "raiseExceptions": logging.raiseExceptions}


def _environment() -> dict[str, str]:
    environment = dict(os.environ._data)  # type: ignore[attr-defined] # ten times as fast as with its texts
    environment.pop(b"PYTEST_CURRENT_TEST", None)
    return environment


def _folder() -> dict[str, str]:
    try:
        return {"": os.getcwd()}  # noqa: PTH109 - a Path would be built for every test
    except FileNotFoundError:
        return {"": "a folder that was removed"}


def _umask() -> dict[str, str]:
    mask = os.umask(0o077)  # there is no way to read it that does not set it
    os.umask(mask)
    return {"": f"{mask:03o}"}


def _python() -> dict[str, Any]:
    return {
        "path": tuple(sys.path),
        "argv": tuple(sys.argv),
        "stdout": sys.stdout,
        "stderr": sys.stderr,
        "excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "unraisablehook": sys.unraisablehook,
        "showwarning": warnings.showwarning,
        "recursion limit": sys.getrecursionlimit(),
        "garbage collection": gc.isenabled(),
        "trace": sys.gettrace(),
    }


def _signals() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in _SIGNALS}


def _limits() -> dict[str, Any]:
    return {name: resource.getrlimit(number) for name, number in _LIMITS.items()}


def _torch() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return {}
    return {
        "threads": torch.get_num_threads(),
        "default type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _mounts(folder: Path) -> frozenset[str]:
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return frozenset()  # not Linux
    return frozenset(line.split()[1] for line in lines if str(folder) in line)


_READERS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "logger": _loggers,
    "logging": _logging,
    "environment variable": _environment,
    "current folder": _folder,
    "umask": _umask,
    "sys": _python,
    "signal handler": _signals,
    "resource limit": _limits,
    "locale": lambda: {"": locale.setlocale(locale.LC_ALL)},
    "context variable": lambda: {variable.name: value for variable, value in copy_context().items()},
    "torch": _torch,
}

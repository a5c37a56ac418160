"""The memory of a process and all that it started."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import psutil
import pytest

from slipway.execution.pressure import TreeMemory, tree_memory

HELD = 64 << 20

#: A process whose second thread starts another, which starts a third that holds memory.
STARTS = f"""
    import subprocess, sys, threading
    holds = "held = bytearray({HELD}); held[::4096] = bytes(len(held[::4096])) ; print('holds', flush=True); input()"
    between = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', sys.argv[1]])"
    thread = threading.Thread(target=subprocess.run, args=([sys.executable, "-S", "-c", between, holds],))
    thread.start()
    thread.join()
"""


@pytest.mark.skipif(not psutil.LINUX, reason="memory is read from /proc")
def test_memory_counts_what_descendants_of_any_thread_hold() -> None:
    command = [sys.executable, "-S", "-c", textwrap.dedent(STARTS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        found = tree_memory(process.pid)
        process.communicate(b"\n")
    assert found.resident >= found.anonymous > HELD
    assert found.peak > HELD


def test_a_process_that_is_gone_has_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
    assert tree_memory(process.pid) == TreeMemory()

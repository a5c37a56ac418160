"""Limits of containers: control groups of both versions, as the kernel writes their files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slipway.machine.cgroup import ControlGroup, available_memory, usable_cores
from slipway.worker.machine import probe

GIB = 1 << 30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def version_2(tmp_path: Path, *, membership: str = "0::/kubepods/pod1/c\n") -> ControlGroup:
    """Make a container's group of 3 GiB inside a pod's of 8 GiB."""
    root = tmp_path / "v2"
    write(root)
    write(root / "kubepods" / "pod1", memory__max=f"{8 * GIB}\n", memory__current="0\n", cpu__max="max 100000\n")
    write(
        root / "kubepods" / "pod1" / "c",
        memory__max=f"{3 * GIB}\n",
        memory__current=f"{2 * GIB}\n",
        memory__stat=f"anon {GIB}\nfile {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\n",
        memory__events="low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n",
        cpu__max="150000 100000\n",
    )
    (tmp_path / "membership").write_text(membership)
    return ControlGroup(root, tmp_path / "membership")


def version_1(tmp_path: Path, *, limit: int = 3 * GIB) -> ControlGroup:
    """Make a container that sees its path on the host while only its own group is mounted."""
    root = tmp_path / "v1"
    write(
        root / "memory",
        memory__limit_in_bytes=f"{limit}\n",
        memory__usage_in_bytes=f"{2 * GIB}\n",
        memory__stat=f"inactive_file 0\nactive_file 0\ntotal_inactive_file {GIB // 2}\ntotal_active_file {GIB // 4}\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
    )
    write(root / "cpu", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")
    (tmp_path / "membership").write_text("4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n0::/\n")
    return ControlGroup(root, tmp_path / "membership")


@pytest.mark.parametrize(("make", "kills", "cores"), [(version_2, 1, 1.5), (version_1, 4, 0.5)], ids=["v2", "v1"])
def test_the_limits_of_a_container_are_known(
    tmp_path: Path, make: Callable[[Path], ControlGroup], kills: int, cores: float
) -> None:
    group = make(tmp_path)
    memory = group.memory()
    assert memory is not None
    assert memory.limit_bytes == 3 * GIB
    assert memory.used_bytes() == 2 * GIB - GIB // 2 - GIB // 4, "pages of files can be given back"
    assert (group.memory_kills(), group.cores()) == (kills, cores)


def test_the_group_around_counts_too(tmp_path: Path) -> None:
    group = version_2(tmp_path)
    (tmp_path / "v2" / "kubepods" / "pod1" / "memory.max").write_text(f"{GIB}\n")
    memory = group.memory()
    assert memory is not None
    assert (memory.limit_bytes, memory.folder.name) == (GIB, "pod1")


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    group = version_1(tmp_path, limit=9223372036854771712)
    assert group.memory() is None
    nowhere = ControlGroup(tmp_path / "absent", tmp_path / "absent")
    assert (nowhere.memory(), nowhere.cores(), nowhere.memory_kills()) == (None, None, None)
    assert available_memory(None) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize("make", [version_2, version_1], ids=["v2", "v1"])
def test_a_worker_offers_what_its_container_may_use(tmp_path: Path, make: Callable[[Path], ControlGroup]) -> None:
    machine = probe(tmp_path, group=make(tmp_path))
    left = 3 * GIB - (2 * GIB - GIB // 2 - GIB // 4)
    assert machine.memory_bytes == left, "the machine these tests run on has more"
    assert machine.capabilities(slots=1).memory_bytes == int(machine.memory_bytes * 0.8)


def test_cores_of_a_quota_are_rounded_up_and_never_more_than_there_are(tmp_path: Path) -> None:
    assert usable_cores(version_1(tmp_path)) == 1
    there = len(os.sched_getaffinity(0))
    assert usable_cores(version_2(tmp_path)) == min(2, there)
    group = version_2(tmp_path)
    (tmp_path / "v2" / "kubepods" / "pod1" / "c" / "cpu.max").write_text("100000000 100000\n")
    assert usable_cores(group) == there


def test_this_process_is_in_a_group() -> None:
    group = ControlGroup()
    memory = group.memory()
    if memory is not None:
        assert 0 < memory.used_bytes() <= memory.limit_bytes
        assert available_memory(memory) <= memory.limit_bytes
    else:
        assert available_memory(memory) > 0

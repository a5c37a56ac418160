"""The first GPU, or slice of one, as NVIDIA's program reports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.machine.processors import Gpu, all_gpus, first_gpu, usable_gpus

LISTS = {
    "whole": "GPU 0: NVIDIA L4 (UUID: GPU-aa)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bb)\n",
    "sliced": (
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-bb)\n"
        "  MIG 3g.40gb     Device  0: (UUID: MIG-c7384736-0001)\n"
        "  MIG 1c.3g.40gb  Device  1: (UUID: MIG-c7384736-0002)\n"
        "  MIG 1g.10gb+me  Device  2: (UUID: MIG-c7384736-0003)\n"
    ),
}
QUERIES = {
    "whole": ["NVIDIA L4, 8.9, 23034", "NVIDIA H100 80GB HBM3, 9.0, 81559"],
    "sliced": ["NVIDIA H100, 9.0, 81559"],
}


def smi(folder: Path, kind: str, *, total: str = "") -> None:
    """Replace NVIDIA's program, which needs a GPU, by one that prints the same for the GPU of ``--id``."""
    rows = [row if not total else row.rpartition(",")[0] + f", {total}" for row in QUERIES[kind]]
    cases = "\n".join(f"    *--id={number}*) echo '{row}';;" for number, row in enumerate(rows))
    everything = "\n".join(rows)
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\ncase \"$*\" in\n    --list-gpus) cat <<'END'\n{LISTS[kind]}END\n;;\n{cases}\n"
        f"    *--id=*) echo 'No devices were found' >&2; exit 6;;\n    *) echo '{everything}';;\nesac\n"
    )
    program.chmod(0o755)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("place", ["", ".", "./"])
def test_a_program_in_the_current_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The current folder may be a checkpoint with code."""
    smi(tmp_path, "whole")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{place}:{tmp_path / 'nothing'}")
    assert first_gpu() is None


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, Gpu("NVIDIA L4", "sm89", 23034 << 20)),
        ("1,0", Gpu("NVIDIA H100 80GB HBM3", "sm90", 81559 << 20)),
        ("7", None),
        ("-1", None),
        ("", None),
    ],
)
def test_a_whole_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: Gpu | None
) -> None:
    smi(tmp_path, "whole")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert first_gpu() == expected


@pytest.mark.parametrize(
    ("visible", "profile", "gigabytes"),
    [
        (None, "3g.40gb", 40),
        ("0", "3g.40gb", 40),
        ("MIG-c7384736-0002", "1c.3g.40gb", 40),
        ("MIG-c7384736-0003", "1g.10gb+me", 10),
    ],
)
@pytest.mark.parametrize("total", ["", "[Insufficient Permissions]"], ids=["all-of-it", "not-said"])
def test_a_slice_has_its_own_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, profile: str, gigabytes: int, total: str
) -> None:
    smi(tmp_path, "sliced", total=total)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert first_gpu() == Gpu(f"NVIDIA H100 MIG {profile}", "sm90", gigabytes * 10**9)


def test_a_slice_that_is_not_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, "sliced")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c7384736-0009")
    assert first_gpu() is None


def test_all_gpus_are_listed_whatever_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    smi(tmp_path, "whole")
    assert all_gpus() == (Gpu("NVIDIA L4", "sm89", 23034 << 20), Gpu("NVIDIA H100 80GB HBM3", "sm90", 81559 << 20))
    smi(tmp_path, "whole", total="[Insufficient Permissions]")
    assert [gpu.memory_bytes for gpu in all_gpus()] == [0, 0]


@pytest.mark.parametrize(
    ("kind", "visible", "count"),
    [
        ("whole", None, 2),
        ("whole", "0,1", 2),
        ("whole", "1", 1),
        ("whole", "1,1", 1),
        ("whole", "0,-1,1", 1),
        ("whole", " 1 , 0 ", 2),
        ("whole", "7", 0),
        ("whole", "", 0),
        ("whole", "-1", 0),
        ("sliced", None, 1),
        ("sliced", "0", 1),
        ("sliced", "MIG-c7384736-0002,MIG-c7384736-0003", 1),
        ("sliced", "MIG-c7384736-0009", 0),
    ],
)
def test_the_gpus_that_tasks_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, visible: str | None, count: int
) -> None:
    smi(tmp_path, kind)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert usable_gpus() == count


def test_without_the_program_there_is_none() -> None:
    assert usable_gpus() == 0
    assert first_gpu() is None
    assert all_gpus() == ()

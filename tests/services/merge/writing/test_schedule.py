"""Threads share out portions within the memory, in order and over several files; a failure ends them all."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import ModelMergeError
from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from slipway_merge.tensors.kernel import Block
from slipway_merge.tensors.outputs import Shard
from slipway_merge.writing import portions
from slipway_merge.writing.output_file import Abandoned, OutputFile
from slipway_merge.writing.portions import Portion
from slipway_merge.writing.writer import OpenShard, Schedule


@dataclass(frozen=True, kw_only=True)
class Text(Portion):
    """Some bytes, made after a while."""

    text: bytes
    memory: int = 0
    inside: list[int] = field(default_factory=list)
    most: list[list[int]] = field(default_factory=list)

    @property
    def needs(self) -> int:
        return self.memory

    def fill(self, file, block, part) -> memoryview | None:
        self.inside.append(self.memory)
        self.most.append(list(self.inside))
        time.sleep(0.02)
        file.write(memoryview(self.text), self.start)
        self.inside.remove(self.memory)
        return memoryview(self.text) if self.start % 2 else None


def schedule(folder: Path, files: dict[str, list[Text]], *, at_once: int, limit: int = 100) -> Schedule:
    """A schedule of files whose content is their portions."""
    shards = [Shard(name, b"".join(portion.text for portion in texts), ()) for name, texts in files.items()]

    def begin(shard: Shard) -> OpenShard:
        file = OutputFile(folder / shard.filename, shard.nbytes)
        return OpenShard(shard, file, iter(files[shard.filename]))

    return Schedule(shards, begin, at_once=at_once, limit=limit)


def texts(count: int, **options) -> list[Text]:
    made, position = [], 0
    for number in range(count):
        text = bytes([65 + number]) * (number + 1)
        made.append(Text(start=position, end=position + len(text), text=text, **options))
        position += len(text)
    return made


def work(plan: Schedule, digests: dict[str, str]) -> None:
    while taken := plan.take():
        shard, portion = taken
        view = portion.fill(shard.file, Block(), portion.change)
        with shard.file.turn(portion.start, portion.end, view):
            pass
        if portion.end == shard.file.nbytes:
            digests[shard.shard.filename] = shard.file.digest()
            shard.file.close()
        plan.give_back(shard, portion)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_file_is_written_and_digested(tmp_path, threads):
    files = {name: texts(12) for name in ("a", "b", "c")}
    plan, digests = schedule(tmp_path, files, at_once=threads), {}
    workers = [threading.Thread(target=work, args=(plan, digests)) for _ in range(threads)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(120)
    content = b"".join(portion.text for portion in texts(12))
    assert {name: (tmp_path / name).read_bytes() for name in files} == dict.fromkeys(files, content)
    assert digests == dict.fromkeys(files, hashlib.sha256(content).hexdigest())
    assert plan.open == []


def test_memory_lets_in_what_fits_and_one_that_never_does(tmp_path):
    inside, most = [], []
    made = [
        Text(start=at, end=at + 1, text=b"x", memory=memory, inside=inside, most=most)
        for at, memory in enumerate((60, 50, 40, 500, 30, 60, 100))
    ]
    plan, digests = schedule(tmp_path, {"a": made}, at_once=4), {}
    together = threading.Barrier(4)

    def begin() -> None:
        together.wait(60)
        work(plan, digests)

    workers = [threading.Thread(target=begin) for _ in range(4)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(120)
    assert len(most) == 7
    assert all(sum(together) <= 100 or together == [500] for together in most)
    assert any(len(together) > 1 for together in most)


def test_threads_keep_apart_while_there_are_files_enough(tmp_path):
    plan = schedule(tmp_path, {"a": texts(2), "b": texts(3), "c": texts(1)}, at_once=2)
    names = []
    while taken := plan.take():
        names.append(taken[0].shard.filename)
    assert names == ["a", "b", "a", "c", "b", "b"]
    for shard in plan.open:
        shard.file.close()


def test_stopping_lets_those_go_who_wait(tmp_path):
    """For memory, for their turn; and nobody takes anything any more."""
    plan = schedule(tmp_path, {"a": texts(3, memory=60)}, at_once=1)
    shard, first = plan.take()
    ended = []

    def take() -> None:
        ended.append(plan.take())

    def wait() -> None:
        with pytest.raises(Abandoned), shard.file.turn(first.end, first.end + 1):
            pass
        ended.append(None)

    waiting = [threading.Thread(target=take), threading.Thread(target=wait)]
    for one in waiting:
        one.start()
    time.sleep(0.05)
    assert not ended
    plan.stop()
    for one in waiting:
        one.join(120)
    assert ended == [None, None]
    assert plan.take() is None
    shard.file.close()


def test_threads_change_nothing(make_case, tmp_path, monkeypatch):
    """Not the bytes, and not the sums in the report, which depend on the order of what is added."""
    monkeypatch.setattr(portions, "BLOCK_ELEMENTS", 100)
    case = make_case("llama", torch.bfloat16, target_modules="all-linear")
    params = MergeParams(verify="spot", max_shard_bytes=10_000)
    found = []
    for threads in (1, 3, 8):
        ctx = Context(workdir=tmp_path / str(threads), threads=threads)
        ctx.workdir.mkdir()
        out = STAGE.run({"base": case.base, "adapter": case.adapter}, params, ctx)["pytorch"]
        assert len(list(out.glob("*.safetensors"))) > 3
        found.append((sorted((path.name, digest) for path, digest in ctx.digests.items()), ctx.facts))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("attempt", range(5))
def test_the_first_failure_of_a_file_is_named(make_case, tmp_path, attempt):
    """Several tensors of one file are bad; whichever thread is first, the error names the one that comes first."""
    case = make_case("llama", target_modules="all-linear")
    weights = load_file(case.base / "model.safetensors")
    order = list(weights)
    for name in order[2:]:
        weights[name].view(-1)[0] = float("nan")
    save_file(weights, case.base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelMergeError) as caught:
        STAGE.run({"base": case.base, "adapter": case.adapter}, MergeParams(), Context(workdir=tmp_path, threads=4))
    assert caught.value.reason == "NON_FINITE_WEIGHTS"
    header = np.fromfile(case.base / "model.safetensors", np.uint8)
    stored = sorted(order[2:], key=lambda name: bytes(header).find(f'"{name}"'.encode()))
    assert caught.value.about["tensor"] == stored[0]


def test_a_disk_that_is_full_for_a_later_file_ends_all_at_once(make_case, tmp_path, monkeypatch):
    """It shows when the file is begun, by one thread, while the others have work for long."""
    case = make_case("llama", target_modules="all-linear")
    monkeypatch.setattr(portions, "BLOCK_ELEMENTS", 1)
    allocate, begun, made = os.posix_fallocate, [], []

    def full_from_the_second_on(descriptor: int, start: int, nbytes: int) -> None:
        begun.append(nbytes)
        if len(begun) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, start, nbytes)

    def slowly(self, view: memoryview, position: int) -> None:
        made.append(position)
        time.sleep(0.01)

    monkeypatch.setattr(os, "posix_fallocate", full_from_the_second_on)
    monkeypatch.setattr(OutputFile, "write", slowly)
    ctx = Context(workdir=tmp_path, threads=3)
    with pytest.raises(ModelMergeError) as caught:
        STAGE.run({"base": case.base, "adapter": case.adapter}, MergeParams(max_shard_bytes=8_000), ctx)
    assert caught.value.reason == "DISK_FULL"
    assert len(begun) <= 1 + ctx.threads, "each thread may have been about to begin another, of the ten and more"
    assert len(made) < 100


def test_a_file_given_up_at_its_last_portion_stays_to_be_closed(tmp_path):
    plan = schedule(tmp_path, {"a": texts(1)}, at_once=1)
    shard, only = plan.take()
    plan.stop()
    plan.give_back(shard, only)
    assert plan.open == [shard]
    shard.file.close()


def test_an_output_that_somebody_cuts_is_an_error_and_no_hang(tmp_path):
    file = OutputFile(tmp_path / "a", 100)
    os.truncate(tmp_path / "a", 40)
    with pytest.raises(OSError, match="truncated the output file at byte 40"), file.turn(0, 100):
        pass
    file.close()

"""Compute many calls of a PyTorch model together, block by block: while the weights of one block are in memory, all calls go through it.

So a model that is larger than the memory is read from its files once in each pass over its blocks, however many calls go through it. The model's own code
runs as it is: each call has a thread, which waits before each block for its turn. One thread works at a time, so the order is always the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from slipway.model.pytorch.block_weights import BlockWeights

HELD_BYTES = 1 << 30
"""Inputs of blocks that wait at the same time: further calls begin in a later pass."""
T = TypeVar("T")
Setting = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which a job's calls are computed, such as one without the adapter."""


def find_blocks(model: Any) -> list[nn.Module]:
    """Return the blocks of a model in its own order, and last the layer that makes its results of hidden states, if it has one."""
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            blocks.append(module)
            inside.update(module.modules())
    head = model.get_output_embeddings()
    return blocks if head is None or head in inside else [*blocks, head]


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A call that waits for a block, with the variables of its context."""

    block: int
    given: tuple[Any, ...]
    named: dict[str, Any]
    context: Context

    @property
    def held_bytes(self) -> int:
        """Return the size of what it brings."""
        values = (*self.given, *self.named.values())
        return sum(each.nbytes for each in values if isinstance(each, Tensor))


class _Ended(BaseException):
    """Unwinds a job that nobody waits for any more."""


class _Job:
    """A function in a thread of its own, which works only in its turn.

    Attributes:
        waits_for: The block or the jobs that it waits for; None before it begins, and when it has ended.
        settings: Contexts in which it is computed.
        result: What it returned.
        error: What it raised.
    """

    def __init__(self, function: Callable[[], Any], settings: tuple[Setting, ...], here: threading.local) -> None:
        self._function, self._here = function, here
        self.settings = settings
        self.waits_for: _Arrival | list[_Job] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._answer: Any = None
        self._fault: BaseException | None = None
        self._turn, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        run = copy_context().run
        self._thread = threading.Thread(target=lambda: run(self._run), name="block-passes", daemon=True)

    @property
    def begun(self) -> bool:
        """Return whether it has begun."""
        return self._thread.ident is not None

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""
        return self.begun and self.waits_for is None

    def advance(self, answer: Any = None, *, fault: BaseException | None = None) -> None:
        """Let it work until it waits again or ends.

        Args:
            answer: What it gets from what it has waited for.
            fault: What is raised there instead.
        """
        self._answer, self._fault, self.waits_for = answer, fault, None
        if self.begun:
            self._turn.release()
        else:
            self._thread.start()
        self._paused.acquire()

    def wait_for(self, what: _Arrival | list[_Job]) -> Any:
        """Give the turn back, and return the answer; called in its own thread."""
        self.waits_for = what
        self._paused.release()
        self._turn.acquire()
        if self._fault is not None:
            raise self._fault
        answer, self._answer = self._answer, None  # a job that has ended keeps no results of the head
        return answer

    def _run(self) -> None:
        self._here.job = self
        torch.get_num_threads()  # the first call in a thread sets the number of all
        torch.set_num_threads(1)  # a team of threads for each job would take more than it gives
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001 - raised again where the jobs are waited for
            self.error = error
        finally:
            self._paused.release()


class BlockPasses:
    """Lets the calls of a model's jobs go through its blocks together.

    Args:
        model: The model, with its adapter if it has one.

    Attributes:
        weights: Brings the weights of a block into memory.
        on_block: Called after each block with the number of blocks that were computed so far, of this pass and those before, and with the
            number of blocks in a pass. How many passes there will be is not known.

    Raises:
        ValueError: It has no blocks that are known.
    """

    def __init__(self, model: nn.Module) -> None:
        self._blocks = find_blocks(model)
        if len(self._blocks) < 2:
            raise ValueError(f"{type(model).__name__} has no blocks that follow each other")
        self.weights = BlockWeights(model, self._blocks)
        self.on_block: Callable[[int, int], None] = lambda *_: None
        self._computed = 0
        self._here = threading.local()
        self._jobs: list[_Job] = []
        self._functions: list[Callable[..., Any]] = []
        self._settings: tuple[Setting, ...] = ()
        self._entered = ExitStack()

    @property
    def inside(self) -> bool:
        """Return whether the caller is one of the jobs."""
        return getattr(self._here, "job", None) is not None

    def together(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run jobs, whose calls of the model go through the blocks together; return their results in order.

        A job may run further ones. A job's calls follow each other; each of them takes one pass over the blocks. If a job raises an error, all of them end,
        and it is raised here.
        """
        if not jobs:
            return []
        own: _Job | None = getattr(self._here, "job", None)
        settings = own.settings if own is not None else ()
        made = [_Job(each, settings, self._here) for each in jobs]
        self._jobs += made
        if own is not None:
            own.wait_for(made)
        else:
            self._drive()
        return [job.result for job in made]

    @contextmanager
    def within(self, setting: Setting) -> Iterator[None]:
        """Compute in a context, within the block; other jobs compute without it. It may be left and entered again in between."""
        job: _Job | None = getattr(self._here, "job", None)
        if job is None:
            with setting():
                yield
            return
        before = job.settings
        job.settings = (*before, setting)
        self._use(job.settings)
        try:
            yield
        finally:
            job.settings = before
            self._use(before)

    @torch.no_grad()
    def _drive(self) -> None:
        """Pass over the blocks until all jobs have ended."""
        threads = torch.get_num_threads()
        try:
            with self._replace_forwards():
                while any(not job.ended for job in self._jobs):
                    self._begin_jobs(threads)
                    for index in range(len(self._blocks)):
                        self._pass(index)
                        self._computed += 1
                        self.on_block(self._computed, len(self._blocks))
        finally:
            self._use(())
            for job in self._jobs:
                while job.begun and not job.ended:
                    job.advance(fault=_Ended())
            self._jobs = []

    def _begin_jobs(self, threads: int) -> None:
        """Begin jobs in order, until what waits for blocks takes all the memory that it may."""
        for job in self._jobs:  # it grows meanwhile
            arrivals = [each.waits_for for each in self._jobs if isinstance(each.waits_for, _Arrival)]
            if arrivals and sum(each.held_bytes for each in arrivals) >= HELD_BYTES:
                break
            if not job.begun:
                self._advance(job)
        torch.set_num_threads(threads)  # a thread's own number is also the number that MKL uses elsewhere

    def _pass(self, index: int) -> None:
        """Compute a block for all calls that wait for it; those without the adapter one after another."""
        here = [(job, at) for job in self._jobs if isinstance(at := job.waits_for, _Arrival) and at.block == index]
        if not here:
            return
        drop = self.weights.hold(self._blocks[index])
        try:
            for settings in dict.fromkeys(job.settings for job, _ in here):
                for job, at in here:
                    if job.settings == settings:
                        self._compute(job, at)
        finally:
            drop()

    def _compute(self, job: _Job, at: _Arrival) -> None:
        self._use(job.settings)
        try:
            answer = at.context.run(self._functions[at.block], *at.given, **at.named)
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything: the job's own code decides
            self._advance(job, fault=error)
        else:
            self._advance(job, answer)

    def _advance(self, job: _Job, answer: Any = None, *, fault: BaseException | None = None) -> None:
        """Let a job work in its settings, and those that waited for it if it was the last."""
        self._use(job.settings)
        job.advance(answer, fault=fault)
        if job.error is not None:
            raise job.error
        if not job.ended:
            return
        for other in self._jobs:
            awaited = other.waits_for
            if isinstance(awaited, list) and all(each.ended for each in awaited):
                self._advance(other)

    def _use(self, settings: tuple[Setting, ...]) -> None:
        if settings == self._settings:
            return
        self._entered.close()
        self._settings = settings
        for each in settings:
            self._entered.enter_context(each())

    @contextmanager
    def _replace_forwards(self) -> Iterator[None]:
        """Let calls wait before each block."""
        own = [block.__dict__.get("forward") for block in self._blocks]
        self._functions = [block.forward for block in self._blocks]
        try:
            for index, block in enumerate(self._blocks):
                block.__dict__["forward"] = self._arrive_at(index)
            yield
        finally:
            for block, forward in zip(self._blocks, own, strict=True):
                del block.__dict__["forward"]
                if forward is not None:
                    block.__dict__["forward"] = forward

    def _arrive_at(self, index: int) -> Callable[..., Any]:
        def forward(*given: Any, **named: Any) -> Any:
            job: _Job = self._here.job
            return job.wait_for(_Arrival(index, given, named, copy_context()))

        return forward

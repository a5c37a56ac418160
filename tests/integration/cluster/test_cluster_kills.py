"""``kill -9`` of the coordinator, of workers and of stages at random moments; CLUSTER_FAULT_RUNS=50 for the full table."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from support.cluster.audit import audit
from support.cluster.cluster import Cluster
from support.cluster.kills import KINDS, RUNS, Run, strike
from support.cluster.reference import Undisturbed, reference

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SEEDS = range(int(os.environ.get("CLUSTER_FAULT_RUNS", "6")))


def text(seed: int) -> str:
    return f"seed-{seed}"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    return reference(tmp_path_factory.mktemp("reference") / "home", [text(seed) for seed in SEEDS])


@pytest.mark.parametrize("seed", SEEDS)
def test_kill_9_at_a_random_moment(cluster: Cluster, expected: dict[str, Undisturbed], seed: int) -> None:
    chance = random.Random(text(seed))
    cluster.all_back()
    began = time.monotonic()
    name = cluster.create(text(seed))
    # Each kind has its turn first, so that a short table has all of them.
    first = strike(cluster, name, kind=KINDS[seed % len(KINDS)], chance=chance)
    assert first is not None
    second = strike(cluster, name, kind=chance.choice(KINDS), chance=chance)
    export = cluster.finished(name)
    seconds = time.monotonic() - began
    audit(cluster, expected, name)
    attempts = sum(len(task.attempts) for task in export.tasks)
    RUNS.append(Run(seed, (first,) if second is None else (first, second), attempts, seconds))


@pytest.fixture(scope="module", autouse=True)
def every_kind_is_killed() -> Iterator[None]:
    """Check after the last run, in whatever order they ran, that the kills hit every kind and several stages."""
    yield
    if len(RUNS) < len(SEEDS):  # some were left out, or failed
        return
    kills = [kill for run in RUNS for kill in run.kills]
    assert {kill.kind for kill in kills} == set(KINDS)
    assert len({kill.stage for kill in kills}) >= min(3, len(SEEDS))

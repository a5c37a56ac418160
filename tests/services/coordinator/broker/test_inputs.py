"""What an engine is told of the inputs of divided work: parts fetch all of theirs, and their join next to nothing."""

from __future__ import annotations

import hashlib

from slipway.artifacts.faults import not_found_error
from slipway.artifacts.manifest import Manifest, ManifestFile
from slipway.planning.references import AttemptKey
from slipway.stage_call import StageCall
from slipway_coordinator.broker.board import Board, ExportOffers
from slipway_coordinator.broker.inputs import Inputs, folder_bytes
from slipway_coordinator.lifecycle.offers import Offer

EXPORT, STAGE = "projects/p/exports/x", "support.stages.divided:STAGE"


def digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def artifact(name: str, **sizes: int) -> Manifest:
    """An artifact of a file of weights and a small one."""
    return Manifest.of(
        ManifestFile(path, size, digest(name + path), "")
        for path, size in ((f"{each}.weights" if each != "small" else each, size) for each, size in sizes.items())
    )


PARTS = [artifact("1", a=100, small=2), artifact("2", b=60, c=61, small=2)]
WHOLE = artifact("whole", a=100, b=60, c=61, small=2)
BASE = artifact("base", d=300)
STORE = {manifest.digest: manifest for manifest in (*PARTS, WHOLE, BASE)}


def manifest(digest: str) -> Manifest:
    if digest not in STORE:
        raise not_found_error(digest)
    return STORE[digest]


def offer(task: str, inputs: list[Manifest], **params: int) -> Offer:
    return Offer(EXPORT, task, 1, StageCall(STAGE, params, {f"i{n}": one.digest for n, one in enumerate(inputs)}))


def key(task: str) -> AttemptKey:
    return AttemptKey.of(EXPORT, task, 1)


def board(**made: Manifest) -> Board:
    known = {manifest.digest: key(task) for task, manifest in made.items()}
    return Board(1.0, lambda: 0.0, wanted={EXPORT: ExportOffers(made_by=known)})


async def test_a_join_fetches_no_weights_and_a_part_all_of_the_base() -> None:
    inputs = Inputs(board(), manifest)
    assert await inputs.measure(offer("part", [BASE], parts=2, part=1)) == {BASE.digest: 300}
    assert await inputs.measure(offer("join", PARTS, parts=2)) == {one.digest: 2 for one in PARTS}
    assert await inputs.measure(offer("whole", PARTS)) == {PARTS[0].digest: 102, PARTS[1].digest: 123}
    assert await inputs.measure(offer("other", [artifact("lost", d=1)])) == {}  # the task itself says so


async def test_a_part_makes_its_share_of_the_output() -> None:
    inputs = Inputs(board(), manifest)

    async def folder(task: str, made: list[Manifest], **params: int) -> int:
        each = offer(task, made, **params)
        return folder_bytes(each, await inputs.measure(each))

    assert await folder("whole", [BASE]) == 600
    assert await folder("part", [BASE], parts=3, part=2) == 400
    assert await folder("join", PARTS, parts=2) == 8


async def test_what_uses_joined_weights_goes_to_the_nodes_of_the_parts() -> None:
    at = {key("p1"): "a", key("p2"): "b", key("join"): "c", key("p3"): "b"}
    inputs = Inputs(board(p1=PARTS[0], p2=PARTS[1], join=WHOLE, p3=BASE), manifest)
    user = offer("user", [WHOLE, BASE])
    sizes = await inputs.measure(user)
    assert inputs.nodes_near(EXPORT, sizes, at) == ("b", "c"), "nothing is known of the join's inputs"
    await inputs.measure(offer("join", PARTS, parts=2))
    assert inputs.nodes_near(EXPORT, sizes, at) == ("b", "a")
    assert inputs.nodes_near(EXPORT, sizes, {}) == ()


async def test_joined_weights_are_at_the_workers_of_the_parts() -> None:
    inputs = Inputs(board(p1=PARTS[0], p2=PARTS[1], join=WHOLE, p3=BASE), manifest)
    joining = offer("join", PARTS, parts=2)
    sizes = {WHOLE.digest: 8, BASE.digest: 5}
    assert inputs.by_part(EXPORT, sizes) == sizes
    assert not inputs.joins(joining.key)
    await inputs.measure(joining)
    assert inputs.joins(joining.key)
    assert inputs.by_part(EXPORT, sizes) == {PARTS[0].digest: 4, PARTS[1].digest: 4, BASE.digest: 5}
    assert inputs.by_part("projects/p/exports/ended", sizes) == sizes


async def test_what_ended_exports_joined_is_forgotten() -> None:
    place = board(join=WHOLE, p1=PARTS[0])
    inputs = Inputs(place, manifest)
    await inputs.measure(offer("join", PARTS, parts=2))
    at = {key("p1"): "a", key("join"): "c"}
    assert inputs.nodes_near(EXPORT, {WHOLE.digest: 8}, at) == ("a",)
    inputs.forget()
    assert inputs.nodes_near(EXPORT, {WHOLE.digest: 8}, at) == ("a",)
    kept = place.wanted.pop(EXPORT)
    inputs.forget()
    place.wanted[EXPORT] = kept
    assert inputs.nodes_near(EXPORT, {WHOLE.digest: 8}, at) == ("c",)

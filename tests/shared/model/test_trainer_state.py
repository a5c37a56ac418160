"""A trainer's state is read within a second and some megabytes, however many steps it logs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from slipway.files.json_documents import LARGEST
from slipway.model.runs.checkpoints import inspect_checkpoint, list_checkpoints
from slipway.model.runs.trainer_state import TrainerState, read_trainer_state
from support.hostile.json_grammar import answer

STEP = {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 1e-4, "loss": 2.5, "step": 1}
STATE = {
    "best_metric": 0.5,
    "best_model_checkpoint": "run/checkpoint-7",
    "global_step": 1_000_000,
    "log_history": [STEP],
    "stateful_callbacks": {"TrainerControl": {"args": {"should_save": True}, "attributes": {}}},
}


def written(state: dict) -> str:
    """As Trainer writes it."""
    return json.dumps(state, indent=2, sort_keys=True) + "\n"


def long_run(path: Path, steps: int, *, every: int = 5000) -> None:
    """Write the state of a run that logged each step and evaluated now and then."""
    begin, end = written({**STATE, "log_history": ["HERE"]}).split('"HERE"')
    with path.open("w") as file:
        file.write(begin)
        for step in range(1, steps + 1):
            entry = {**STEP, "loss": 1 / step, "step": step}
            if step % every == 0:
                entry = {"eval_loss": 2 / step, "eval_runtime": 1.5, "step": step}
            file.write(json.dumps(entry, indent=2, sort_keys=True) + ("," if step < steps else ""))
        file.write(end)


@pytest.mark.parametrize("steps", [1000, pytest.param(200_001, marks=pytest.mark.slow)])
def test_a_long_run_is_read_at_its_ends(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "trainer_state.json"
    long_run(path, steps, every=500)
    assert (path.stat().st_size > LARGEST) == (steps > 1000)
    found = answer(lambda: read_trainer_state(path), megabytes=20)
    last = steps - 1 if steps % 500 == 0 else steps
    losses = {"loss": 1 / last, "eval_loss": 2 / (steps // 500 * 500)}
    assert found == TrainerState(1_000_000, losses, "run/checkpoint-7", 0.5)


@pytest.mark.parametrize(
    "entries",
    [
        lambda: "[" + "[]," * 20_000_000 + "[]]",
        lambda: "[" + "{}," * 15_000_000 + "{}]",
        lambda: "[" + '{"loss":1},' * 5_000_000 + "{}]",
        lambda: "[" + '{"loss": [' + "1," * 20_000_000 + "1]}]",
        lambda: "[" + "{" * 50_000_000,
        lambda: '["' + "x" * 50_000_000 + '"]',
    ],
    ids=["lists", "objects", "losses", "numbers", "unclosed", "text"],
)
def test_a_hostile_log_takes_neither_time_nor_memory(tmp_path: Path, entries) -> None:  # type: ignore[no-untyped-def]
    checkpoint = tmp_path / "checkpoint-7"
    checkpoint.mkdir()
    text = entries()
    (checkpoint / "trainer_state.json").write_text(f'{{"global_step": 7, "log_history": {text}}}')
    del text
    found = answer(lambda: inspect_checkpoint(checkpoint), megabytes=50)
    assert found.step == 7


def test_the_largest_state_that_is_read_whole_is_within_the_limits(tmp_path: Path) -> None:
    names = (f'{{"loss":{number}}},' for number in itertools.count(1_000_000))
    log = "".join(itertools.islice(names, 131_000))[:-1]
    (tmp_path / "trainer_state.json").write_text(f'{{"global_step": 7, "log_history": [{log}]}}')
    assert answer(lambda: read_trainer_state(tmp_path / "trainer_state.json")).step == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (lambda: " " * (LARGEST + 1), "no log_history within"),
        (lambda: '{"log_history": [' + "{}," * LARGEST + '{}], "global_step": 7}', "names no global_step"),
        (lambda: '{"global_step": 7, "log_history": [' + "{}," * LARGEST, "cut off"),
    ],
    ids=["blank", "step-after-log", "half-written"],
)
def test_a_large_state_that_trainer_has_not_written_is_named(tmp_path: Path, text, says: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "trainer_state.json").write_text(text())
    with pytest.raises(ValueError, match=says):
        read_trainer_state(tmp_path / "trainer_state.json")


def test_many_links_to_one_checkpoint_are_listed_and_their_target_is_read_once(tmp_path: Path) -> None:
    target = tmp_path / "run" / "checkpoint-1"
    target.mkdir(parents=True)
    (target / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 6}')
    state = written({**STATE, "global_step": 1, "log_history": [STEP] * 20_000})
    (target / "trainer_state.json").write_text(state)
    for number in range(1000, 3000):
        (target.parent / f"checkpoint-{number}").symlink_to("checkpoint-1")
    found = answer(lambda: list_checkpoints(target.parent), seconds=3)
    assert isinstance(found, list)
    assert {checkpoint.path.name for checkpoint in found} == {"checkpoint-1"} | {
        f"checkpoint-{n}" for n in range(1000, 3000)
    }
    assert {(checkpoint.step, checkpoint.loss, checkpoint.rank) for checkpoint in found} == {(1, 2.5, 6)}
    assert "was saved at step 1" in next(each for each in found if each.path.name == "checkpoint-2000").warnings[0]


def test_a_link_has_its_own_name_and_its_targets_problems(tmp_path: Path) -> None:
    target = tmp_path / "run" / "tmp-checkpoint-1"
    target.mkdir(parents=True)
    (target.parent / "checkpoint-2").symlink_to("tmp-checkpoint-1")
    link, unfinished = list_checkpoints(target.parent)
    assert (link.path, unfinished.path) == (target.parent / "checkpoint-2", target)
    assert [problem.reason for problem in link.problems] == ["ADAPTER_CONFIG_MISSING", "CHECKPOINT_INCOMPLETE"]
    assert unfinished.problems[0].message == "it was still being written when its process ended"

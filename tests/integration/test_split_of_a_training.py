"""The two halves of a training's own split: one to calibrate with, the other to judge by, both as the trainer has them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from support.commands.cli import Done, slipway
from support.models import tiny_models

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SYSTEM = "You are a helpful assistant that was trained by people who wrote this long prompt for every conversation."


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with a chat template, a run on it, and the files of its split."""
    root = tmp_path_factory.mktemp("split")
    (tiny_models.make_base(root / "base") / "chat_template.jinja").write_text(TEMPLATE)
    tiny_models.make_checkpoint(root / "base", root / "run")
    write(root / "train.jsonl", range(60))
    write(root / "eval.jsonl", range(100, 112))
    return root


def write(path: Path, numbers: range) -> None:
    path.write_text("".join(json.dumps({"messages": conversation(number)}) + "\n" for number in numbers))


def conversation(number: int) -> list[dict[str, str]]:
    draw = random.Random(number)
    said = " ".join(draw.choices(tiny_models.WORDS, k=200))
    question = f"Please explain the topic of number {number} to somebody who has never heard anything about it before."
    told = (("system", SYSTEM), ("user", question), ("assistant", said))
    return [{"role": role, "content": content} for role, content in told]


def export(project: Path, calibration: str, heldout: str, *options: str, home: str) -> Done:
    given = {
        "formats.onnx.enabled": "false",
        "validation.benchmark_performance": "false",
        "validation.test_samples": "2",
        "optimization.group_size": "16",
        "optimization.quantization": "int4",
        "optimization.method": "gptq",
        "optimization.time_budget": "5",
        "optimization.calibration": project / calibration,
        "validation.heldout": project / heldout,
    }
    where = ("--base-model", project / "base", "--checkpoint", project / "run", "--out", project / f"out-{home}")
    settings = (part for name, value in given.items() for part in ("--set", f"{name}={value}"))
    return slipway("export", *options, *where, *settings, home=project / home)


@pytest.mark.slow
def test_a_split_calibrates_and_judges_without_overlap(project: Path) -> None:
    done = export(project, "train.jsonl", "eval.jsonl", "--json", home="split")
    assert done.code == 0, done.err
    assert "held-out text too" not in done.err
    lineage = json.loads((Path(done.json["output_directory"]) / "lineage.json").read_text())
    (profile,) = [task["profile"] for task in lineage["tasks"] if "profile" in task]
    assert profile["heldout"]["passages_left_out"] == 0
    assert profile["passages"] == 60
    assert done.json["formats"]["pytorch-int4"]["mean_kl"] > 0


@pytest.mark.parametrize("options", [("--plan",), ("--json",)])
def test_the_same_file_for_both_is_refused_before_anything_runs(project: Path, options: tuple[str, ...]) -> None:
    done = export(project, "train.jsonl", "train.jsonl", *options, home=f"same-{len(options[0])}")
    assert done.code == 3, done.err
    said = " ".join((done.out + done.err).split())
    assert "optimization.calibration and validation.heldout are the same text" in said
    assert "hold other text out" in said
    if options == ("--json",):
        assert done.json["reason"] == "CALIBRATION_OVERLAP"
        assert "attempts" not in done.json, "nothing ran"
    assert not list((project / f"out-same-{len(options[0])}").glob("*"))


def test_a_split_that_leaves_too_little_is_refused_before_anything_runs(project: Path) -> None:
    lines = (project / "eval.jsonl").read_text().splitlines()
    (project / "part.jsonl").write_text("\n".join(lines[3:]))
    done = export(project, "part.jsonl", "eval.jsonl", "--json", home="part")
    assert done.code == 3, done.err
    assert "9 passages of the text for calibration are in the held-out text too" in done.err
    assert not list((project / "out-part").glob("*"))


def test_what_is_in_both_is_named_before_anything_runs(project: Path) -> None:
    train, held_out = ((project / f"{name}.jsonl").read_text().splitlines() for name in ("train", "eval"))
    (project / "more.jsonl").write_text("\n".join([*train, held_out[4]]))
    done = export(project, "more.jsonl", "eval.jsonl", "--plan", "--json", home="more")
    assert done.code == 0, done.err
    (said,) = [each for each in done.json["warnings"] if "held-out text" in each]
    assert "1 of 61 passages" in said
    assert said.endswith("left out: more.jsonl, line 61")

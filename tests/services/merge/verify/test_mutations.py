"""Whatever is wrong with the inputs, the merge is what peft makes of them or a typed refusal, and touches only its folder.

What is merged is compared with peft on the very same mutated files, so a mutation that passed unnoticed would show: the weights
that peft gets from the mutated tensor would not be those that were written.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipway.errors import ModelExportError
from slipway.reasons import REASONS
from support.models.merge_cases import Case, load, make_case

VALUES: list[Any] = [
    None, True, 0, -1, 1, 2.5, math.inf, math.nan, "", "x", "(", [], [1], ["q_proj"], {}, {"a": 1}, [[]], 10**30,
]  # fmt: skip
SEEDS = 160
PER_TEST = 20
TENSORS = ("F16", "BF16", "I32", "F8_E4M3", "nonsense")


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> list[Case]:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("qwen3", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("llama", {"shard": "12KB", "use_rslora": True, "rank_pattern": {"q_proj": 2}}),
        ("gpt2", {"fan_in_fan_out": True}),
        ("qwen3", {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}),
        ("llama", {"use_dora": True, "target_modules": ["v_proj"]}),
    ]
    return [make_case(tmp_path_factory.mktemp("original"), kind, **options) for kind, options in kinds]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Counter[str]]:
    """How the cases of this process ended; both kinds must be among them, or the test would show nothing."""
    counter: Counter[str] = Counter()
    yield counter
    if counter.total() >= 2 * PER_TEST:
        assert 0 < counter["merged"] < counter.total()


def mutate_json(path: Path, rng: random.Random) -> None:
    settings = json.loads(path.read_text())
    key = rng.choice([*sorted(settings), "use_dora", "quantization_config", "text_config", "an_option", "lora_alpha"])
    if isinstance(settings.get(key), int | float) and rng.random() < 0.5:
        settings[key] = rng.choice([settings[key] * 2, settings[key] + 1, settings[key] / 2])
    else:
        settings[key] = rng.choice(VALUES)
    path.write_text(json.dumps(settings))


def mutate_header(path: Path, rng: random.Random) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = rng.choice(sorted(name for name in header if name != "__metadata__"))
    entry = header[name]
    match rng.randrange(5):
        case 0:
            other = rng.choice([f"{name}x", "lm_head.weight", name.replace("0", "7"), name.replace("lora_A", "lora_B")])
            header[other] = header.pop(name)
        case 1:
            entry["dtype"] = rng.choice(TENSORS)
        case 2:
            entry["shape"] = rng.choice([entry["shape"][::-1], [1, *entry["shape"]], [math.prod(entry["shape"])], [0]])
        case 3:  # two tensors change places
            other = rng.choice(sorted(key for key in header if key != "__metadata__"))
            header[name], header[other] = header[other], header[name]
        case _:
            del header[name]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def mutate_bytes(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        del raw[rng.randrange(len(raw)) :]
    for _ in range(rng.choice([1, 4, 50]) if raw else 0):
        raw[rng.randrange(min(len(raw), rng.choice([16, 2000, 1 << 30])))] = rng.randrange(256)
    path.write_bytes(raw)


def mutate_values(path: Path, rng: random.Random) -> None:
    """Bits of a tensor's values only: everything still fits together."""
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(rng.choice([1, 20])):
        raw[rng.randrange(start, len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def mutate_folder(path: Path, rng: random.Random) -> None:
    if rng.random() < 0.5:
        path.unlink()
    else:
        path.rename(path.with_name(f"other-{path.name}"))


def mutated(original: Case, folder: Path, rng: random.Random) -> Case:
    case = Case(folder / "base", folder / "adapter", folder / "work")
    shutil.copytree(original.base, case.base)
    shutil.copytree(original.adapter, case.adapter)
    case.workdir.mkdir()
    where = rng.choice([case.base, case.adapter])
    path = rng.choice(sorted(entry for entry in where.iterdir() if entry.suffix in {".json", ".safetensors"}))
    kinds = [mutate_bytes, mutate_folder]
    kinds += [mutate_json] * 3 if path.suffix == ".json" else [mutate_header, mutate_header, mutate_values]
    rng.choice(kinds)(path, rng)
    return case


def files(folder: Path) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def assert_as_peft(case: Case, original: Case, out: Path, seed: int) -> None:
    try:
        expected = case.reference(torch.float32).merge_and_unload().state_dict()
    except Exception:  # noqa: BLE001 - peft refuses a setting, or fails over one, that no weight depends on
        original.workdir = case.workdir / "original"
        original.workdir.mkdir()
        expected = load(original.merge()[0], dtype=torch.float32).state_dict()
    ours = load(out, dtype=torch.float32).state_dict()
    assert ours.keys() == expected.keys(), seed
    for name, weight in ours.items():
        scale = float(expected[name].abs().max())
        assert torch.allclose(weight, expected[name], rtol=1e-5, atol=1e-6 * scale, equal_nan=False), (seed, name)


# Some of them with every change, all of them with make test-all.
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.slow if first >= 2 * PER_TEST else ())
        for first in range(0, SEEDS, PER_TEST)
    ],
)
@pytest.mark.timeout(120)
def test_mutated_inputs(originals, outcomes, tmp_path, first):
    for seed in range(first, first + PER_TEST):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        original = rng.choice(originals)
        case = mutated(original, folder, rng)
        before = files(folder)
        try:
            out, _ = case.merge()
        except ModelExportError as error:
            outcomes[error.reason] += 1
            assert error.reason in REASONS
            assert error.reason not in {"INTERNAL", "STAGE_ERROR"}, seed
            assert str(error)
            assert error.remedy, seed
        else:
            outcomes["merged"] += 1
            assert_as_peft(case, original, out, seed)
        after = {path: digest for path, digest in files(folder).items() if case.workdir not in path.parents}
        assert after == before, seed
        shutil.rmtree(folder)

"""Whatever is wrong with the inputs, the merge ends with a result or a typed refusal, and touches nothing but its folder."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from merge_cases import Case, make_case
from slipway.errors import ModelExportError

VALUES: list[Any] = [
    None, True, 0, -1, 1, 2.5, math.inf, math.nan, "", "x", "(", [], [1], ["q_proj"], {}, {"a": 1}, [[]], 10**30,
]  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> list[Case]:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("qwen3-tied", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("llama", {"shard": "12KB", "use_rslora": True, "rank_pattern": {"q_proj": 2}}),
        ("gpt2", {"fan_in_fan_out": True}),
        ("qwen3", {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}),
    ]
    return [make_case(tmp_path_factory.mktemp("original"), kind, **options) for kind, options in kinds]


def mutate_json(path: Path, rng: random.Random) -> None:
    settings = json.loads(path.read_text())
    key = rng.choice([*sorted(settings), "use_dora", "quantization_config", "text_config", "an_option"])
    settings[key] = rng.choice(VALUES)
    path.write_text(json.dumps(settings))


def mutate_header(path: Path, rng: random.Random) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    names = sorted(name for name in header if name != "__metadata__")
    name = rng.choice(names)
    entry = header[name]
    match rng.randrange(4):
        case 0:
            renamed = rng.choice(
                [f"{name}x", "lm_head.weight", name.replace("0", "7"), name.replace("lora_A", "lora_B")]
            )
            header[renamed] = header.pop(name)
        case 1:
            entry["dtype"] = rng.choice(["F16", "BF16", "I32", "F8_E4M3", "nonsense"])
        case 2:
            entry["shape"] = rng.choice([entry["shape"][::-1], [1, *entry["shape"]], [math.prod(entry["shape"])], [0]])
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


@pytest.mark.parametrize("seed", range(160))
def test_mutated_inputs(originals, tmp_path, seed):
    rng = random.Random(seed)
    original = rng.choice(originals)
    case = Case(tmp_path / "base", tmp_path / "adapter", tmp_path / "work")
    shutil.copytree(original.base, case.base)
    shutil.copytree(original.adapter, case.adapter)
    case.workdir.mkdir()
    folder = rng.choice([case.base, case.adapter])
    path = rng.choice(sorted(entry for entry in folder.iterdir() if entry.suffix in {".json", ".safetensors"}))
    mutation = rng.choice([mutate_bytes, mutate_json if path.suffix == ".json" else mutate_header])
    mutation(path, rng)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    try:
        case.merge()
    except ModelExportError as error:
        assert str(error)
        assert error.reason not in {"INTERNAL", "STAGE_ERROR"}
    after = {
        file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and case.workdir not in file.parents
    }
    assert after == before

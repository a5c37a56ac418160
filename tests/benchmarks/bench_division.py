"""Work in parts: how much of its processor time is lost, and what a second worker brings.

Usage: ``python tests/benchmarks/bench_division.py [--megabytes 320] [--parts 4] [--runs 1] [--folder DIR]``. A Llama of wide layers, drawn and
not trained, is merged with a LoRA of rank 16, and merged and rounded to int4. Each is done in one piece by one worker, in parts by one, and in
parts by two, which pull from a coordinator, share a folder as store, and have one slot and one core each. The efficiency of two is the time of
one piece by one, divided by twice the time of parts by two, over the same bytes read and written. Workers get too little memory for the trial
run of a rounded model, which a divided one never has. Core seconds are those of workers and all that they started, without their own start.
Prints a row for each and writes ``results/division.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipway.artifacts import LocalStore
from slipway.client import Client
from slipway.configuration import parse
from slipway.errors import ModelExportError
from slipway.model.safetensors_layout import TensorSpec, plan_files
from slipway_protos.v1 import export_pb2
from support.commands.cli import SLIPWAY, environment
from support.models.tiny_models import save_tokenizer
from support.servers.free_ports import free_port

RESULTS = Path(__file__).parent / "results"
HIDDEN, WIDE, HEADS, GROUPS, VOCABULARY, RANK = 2048, 8192, 16, 4, 12288, 16
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": HIDDEN, "intermediate_size": WIDE,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HIDDEN // HEADS, "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN * GROUPS // HEADS, HIDDEN),
    "self_attn.v_proj": (HIDDEN * GROUPS // HEADS, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE),
}  # fmt: skip
LAYER_BYTES = 2 * sum(rows * columns for rows, columns in LINEAR.values())
WORK: dict[str, dict[str, Any]] = {
    "merge": {"formats": {"pytorch": {"enabled": True}}},
    "int4": {"formats": {"pytorch": {"enabled": True, "quantization": "int4"}}, "optimization": {"wide_share": 0}},
}
WAYS = {"one piece, one worker": (1, False), "parts, one worker": (1, True), "parts, two workers": (2, True)}


def save(folder: Path, shapes: dict[str, tuple[int, ...]], *, size: float, most: int = 1 << 40) -> None:
    """Write drawn tensors in bfloat16: one block of values, which begins elsewhere in each piece."""
    drawn = np.random.default_rng(0).standard_normal(1 << 20, np.float32) * np.float32(size)
    block = np.concatenate([(drawn.view(np.uint32) >> 16).astype(np.uint16)] * 2)
    files = plan_files([[TensorSpec(name, "BF16", shape)] for name, shape in shapes.items()], max_shard_bytes=most)
    place = 0

    def values(tensor: Any) -> Iterator[memoryview]:
        nonlocal place
        for start in range(0, tensor.numel, 1 << 20):
            place = (place + 7919) % (1 << 20)
            yield block[place : place + min(1 << 20, tensor.numel - start)].view(np.uint8).data

    for file in files:
        name = file.filename if most < 1 << 40 else "adapter_model.safetensors"
        for _ in file.write(folder / name, values):
            pass
    if len(files) > 1:
        weight_map = {tensor.name: file.filename for file in files for tensor in file.tensors}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_model(root: Path, layers: int) -> None:
    """Write a base of so many layers, and an adapter of all its linear layers."""
    base, adapter = root / "base", root / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    table = (VOCABULARY, HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    shapes["model.norm.weight"] = (HIDDEN,)
    lora: dict[str, tuple[int, ...]] = {}
    for number in range(layers):
        for name, (rows, columns) in LINEAR.items():
            module = f"model.layers.{number}.{name}"
            shapes[f"{module}.weight"] = (rows, columns)
            lora[f"base_model.model.{module}.lora_A.weight"] = (RANK, columns)
            lora[f"base_model.model.{module}.lora_B.weight"] = (rows, RANK)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{number}.{norm}.weight"] = (HIDDEN,)
    save(base, shapes, size=0.02, most=1 << 30)
    save(adapter, lora, size=0.02)
    (base / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    save_tokenizer(base)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 24, "bias": "none"}
    settings |= {
        "target_modules": sorted(name.rpartition(".")[2] for name in LINEAR),
        "base_model_name_or_path": "base",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(settings))


def measure(root: Path, place: Path, work: str, *, workers: int, parts: int) -> dict[str, float]:
    """Export once with a store and workers of its own; return seconds from the first task's start to the last one's end, and core seconds."""
    size = sum(path.stat().st_size for path in (root / "base").glob("*.safetensors"))
    share = -(-size // parts)
    # Rounded files are smaller than stored ones, and there must be as many.
    shards = share if work == "merge" else share // 4
    execution = {"split_bytes": share if parts > 1 else 0, "shard_bytes": max(1 << 20, shards)}
    settings = {**WORK[work], "validation": {"enabled": False}, "checkpoint": {"path": "run"}, "execution": execution}
    settings["formats"] = {**settings["formats"], "onnx": {"enabled": False}}
    store = LocalStore(place / "store")
    sources = {
        name: store.put_files({path.name: path for path in (root / name).iterdir()}) for name in ("base", "adapter")
    }
    address = f"127.0.0.1:{free_port()}"
    alone = ["--slots", "1", "--cores", "1", "--memory-bytes", str(size), "--stage", "merge,quantize"]
    with ExitStack() as running:
        _start(running, place, "coordinator", "--listen", address, "--state", str(place / "state.db"))
        pids = [_start(running, place, "worker", "--coordinator", address, *alone) for _ in range(workers)]
        client = running.enter_context(_client(address, workers))
        before = sum(map(_core_seconds, pids))
        made = _finished(client, client.create_export(parse(settings), sources=sources).name)
        used = sum(map(_core_seconds, pids)) - before
    attempts = [attempt for task in made.tasks for attempt in task.attempts]
    began = min(attempt.start_time.ToNanoseconds() for attempt in attempts)
    ended = max(attempt.end_time.ToNanoseconds() for attempt in attempts)
    return {"seconds": (ended - began) / 1e9, "core_seconds": used, "tasks": len(made.tasks)}


def _start(running: ExitStack, place: Path, *words: str) -> int:
    """Start a service that ends with the context; return the id of its process."""
    log = running.enter_context((place / f"{words[0]}.log").open("ab"))
    process = subprocess.Popen([SLIPWAY, *words], env=environment(place), stdout=log, stderr=log)
    running.callback(process.wait)
    running.callback(process.terminate)
    return process.pid


def _client(address: str, workers: int) -> Client:
    """Return a client of a coordinator at which all workers have reported: the first one would get what others could do."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(ModelExportError):  # it does not listen yet
            client = Client(address)
            if len(client.list_workers().workers) == workers:
                return client
            client.close()
        time.sleep(0.2)
    raise RuntimeError("the workers do not start")


def _finished(client: Client, name: str) -> export_pb2.Export:
    while True:
        made = client.get_export(name)
        if made.state == export_pb2.EXPORT_STATE_SUCCEEDED:
            return made
        if made.HasField("end_time"):
            raise RuntimeError(f"the export ended otherwise: {made.error}")
        time.sleep(0.1)


def _core_seconds(pid: int) -> float:
    """Of a process and what it started and has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Make the model, measure all ways in turns, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=320, help="size of the base")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--work", choices=sorted(WORK), action="append", help="all if not named")
    parser.add_argument("--folder", type=Path, help="where the models and stores lie; three times the size of the base")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        root = Path(made)
        make_model(root, max(1, round((arguments.megabytes * 1e6 - 4 * VOCABULARY * HIDDEN) / LAYER_BYTES)))
        for number in range(arguments.runs):
            for work in arguments.work or WORK:
                for way, (workers, divided) in WAYS.items():
                    with tempfile.TemporaryDirectory(dir=root) as place:
                        parts = arguments.parts if divided else 1
                        row = measure(root, Path(place), work, workers=workers, parts=parts)
                    found.setdefault(f"{work}: {way}", []).append(row)
                    print(f"run {number + 1}: {work}: {way}: {row}", flush=True)
    best = {name: min(row["seconds"] for row in rows) for name, rows in found.items()}
    figures: dict[str, float] = {"megabytes": arguments.megabytes, "parts": arguments.parts}
    for name, rows in found.items():
        work = name.partition(":")[0]
        cores, whole = statistics.median(row["core_seconds"] for row in rows), best[f"{work}: one piece, one worker"]
        efficiency = whole / (WAYS[name.partition(": ")[2]][0] * best[name])
        print(f"{name:32} {best[name]:7.1f} s {cores:7.1f} core seconds, efficiency {efficiency:.2f}")
        figures |= {f"{name}, seconds": best[name], f"{name}, core seconds": cores, f"{name}, efficiency": efficiency}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "division.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

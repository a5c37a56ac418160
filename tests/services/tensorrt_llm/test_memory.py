"""A checkpoint takes the memory of a piece, whatever the size of the tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

_LIMIT_MIB = 24
"""A piece in float32, its conversion and the comparison's copies; the largest tensor has 128 MiB in float32."""
_PROGRAM = """
import sys, threading
from pathlib import Path
import ml_dtypes, numpy, slipway_tensorrt_llm.export
from slipway.stage import Context
from slipway_tensorrt_llm.params import TensorRTLLMParams
from slipway_tensorrt_llm.stage import STAGE

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

before, peak, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
STAGE.run({"pytorch": Path(sys.argv[1])}, TensorRTLLMParams(dtype="float32", tp=2), Context(workdir=Path(sys.argv[2])))
done.set()
watcher.join()
print((peak[0] - before) // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    sizes = {"vocab_size": 1 << 15, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1}
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "tie_word_embeddings": True, **sizes}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    matrix, norm, layer = (
        torch.ones(1024, 1024, dtype=torch.bfloat16),
        torch.ones(1024, dtype=torch.bfloat16),
        "model.layers.0.",
    )
    names = [f"self_attn.{one}_proj" for one in "qkvo"] + [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
    tensors = {f"{layer}{name}.weight": matrix.clone() for name in names}
    tensors |= {f"{layer}{name}_layernorm.weight": norm.clone() for name in ("input", "post_attention")}
    tensors |= {"model.norm.weight": norm, "model.embed_tokens.weight": torch.ones(1 << 15, 1024, dtype=torch.bfloat16)}
    save_file(tensors, model / "model.safetensors")
    (tmp_path / "work").mkdir()
    words = [sys.executable, "-P", "-c", _PROGRAM, model, tmp_path / "work"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < _LIMIT_MIB

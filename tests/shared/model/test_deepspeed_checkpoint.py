"""The command for a checkpoint of DeepSpeed's shards, run as it is printed, on what DeepSpeed itself saved (on the processor)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipway.errors import CheckpointValidationError
from slipway.model.runs.checkpoints import find_checkpoint
from support.models.merge_cases import make_case
from support.servers.free_ports import free_port

if find_spec("deepspeed") is None:  # which takes seconds to import, and runs in processes of its own
    pytest.skip("DeepSpeed is not installed: make test-deepspeed does", allow_module_level=True)

#: Trains nothing: loads base and adapter, and saves them as a training with DeepSpeed does. Without the kernel that several processes
#: of a machine share memory with, which DeepSpeed would compile for this one.
SAVE = """
import sys, deepspeed, torch, transformers, peft
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
base, adapter, folder, stage = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(base)
model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": int(stage)},
            "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, optimizer=torch.optim.SGD(trained), config=settings)
engine.save_checkpoint(folder, tag="global_step2", exclude_frozen_parameters=True)
model.peft_config["default"].save_pretrained(folder)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_its_command_makes_an_adapter(tmp_path, stage):
    case = make_case(tmp_path, "llama", target_modules=["q_proj"])
    folder = tmp_path / "run/checkpoint-2"
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **alone, "PATH": tools, "DS_ACCELERATOR": "cpu"}
    arguments = [str(case.base), str(case.adapter), str(folder), str(stage)]
    subprocess.run([sys.executable, "-c", SAVE, *arguments], env=environment, check=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2, "log_history": []}))
    with pytest.raises(CheckpointValidationError) as caught:
        find_checkpoint(folder.parent)
    subprocess.run(caught.value.remedy.removeprefix("run: "), shell=True, env=environment, check=True)
    assert find_checkpoint(folder.parent).step == 2
    merged = load_file(case.merge(verify="spot")[0] / "model.safetensors")
    case.adapter, case.workdir = folder, tmp_path / "again"
    case.workdir.mkdir()
    again = load_file(case.merge(verify="spot")[0] / "model.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in merged.items())

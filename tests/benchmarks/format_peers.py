"""What makes the outputs that ``bench_formats.py`` compares: commands of Slipway's stages, and of the tool that a user would pick instead."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf

from slipway_gguf.levels import LEVELS

BIN = Path(sys.executable).parent
LENGTH = 1024
"""Most tokens of a program for ExecuTorch."""
GROUP = 128
"""Weights that share a scale in optimum-intel's and ExecuTorch's recipes for 4 bits."""
Command = Sequence[str | Path]

QUANTIZE = """
import ctypes, sys
from pathlib import Path
from slipway.machine.cgroup import usable_cores

class Params(ctypes.Structure):  # the first two of llama_model_quantize_params, with room for the others
    _fields_ = [("threads", ctypes.c_int32), ("type", ctypes.c_int32), ("rest", ctypes.c_char * 248)]

folder, source, target, kind = Path(sys.argv[1]), *sys.argv[2:]
_, ggml, llama = (
    ctypes.CDLL(str(next(folder.glob(name))), mode=ctypes.RTLD_GLOBAL)
    for name in ("libggml-base*.so*", "libggml.*so*", "libllama.*so*")
)
ggml.ggml_backend_load_all_from_path(str(folder).encode())
llama.llama_model_quantize_default_params.restype = Params
params = llama.llama_model_quantize_default_params()
params.threads, params.type = usable_cores(), int(kind)
sys.exit(llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))
"""
"""llama.cpp's own quantizer, from a file that holds the weights exactly."""

BY_HAND = """
import sys, torch
from transformers import AutoModelForCausalLM
kind, folder, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False).eval()

class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).logits

ids = torch.randint(3, 100, (1, 128))
with torch.no_grad():
    if kind == "torchscript":
        torch.jit.save(torch.jit.freeze(torch.jit.trace(Logits().eval(), (ids,))), target)
    else:
        torch.export.save(torch.export.export(Logits().eval(), (ids,)), target)
"""
"""What tutorials show: the logits of a text of one length, without a cache, with no check."""

EXPORT_LLM = """
import json, os, runpy, sys, torch
from pathlib import Path
from executorch.examples.models.qwen3.convert_weights import convert_weights
folder, out, config = sys.argv[1:]
described, out = json.loads((Path(folder) / "config.json").read_text()), Path(out)
rope = described.get("rope_parameters") or described
params = {
    "dim": described["hidden_size"], "hidden_dim": described["intermediate_size"], "n_heads": described["num_attention_heads"],
    "head_dim": described["head_dim"], "n_kv_heads": described["num_key_value_heads"], "n_layers": described["num_hidden_layers"],
    "norm_eps": described["rms_norm_eps"], "rope_theta": rope["rope_theta"], "use_scaled_rope": False,
    "vocab_size": described["vocab_size"], "use_hf_rope": True, "attention_qkv_bias": False, "use_qk_norm": True,
    "qk_norm_before_rope": True,
}
(out / "params.json").write_text(json.dumps(params))
convert_weights(folder, str(out / "weights.pth"))
os.chdir(out)  # where it logs
sys.argv = ["export_llm", *json.loads(config), f"base.checkpoint={out}/weights.pth", f"base.params={out}/params.json"]
runpy.run_module("executorch.extension.llm.export.export_llm", run_name="__main__")
"""


@dataclass(frozen=True)
class Made:
    """One way to make an output.

    Attributes:
        commands: What is run, for the model's folder and an empty folder.
        result: The output within that folder: a file or a folder, by pattern.
    """

    commands: Callable[[Path, Path], list[Command]]
    result: str


@dataclass(frozen=True)
class Case:
    """One output, made by Slipway and by its peers.

    Attributes:
        ours: By Slipway.
        peers: By others, by name.
        runtime: What runs the results, a key of ``format_speed.RUNTIMES``.
    """

    ours: Made
    peers: dict[str, Made] = field(default_factory=dict)
    runtime: str = ""


def stage(name: str, folder: Path | str, out: Path, *params: str, given: str = "pytorch") -> Command:
    """Return the command of one stage."""
    asked = [word for one in params for word in ("--param", one)]
    return [BIN / "slipway", "stage", name, "--input", f"{given}={folder}", *asked, "--out", out]


def gguf_case(level: str, peer: Path | None, exact: str) -> Case:
    """GGUF: the stage from the model's weights; llama.cpp's quantizer from a file that a converter has made before."""
    kind = str(int(gguf.LlamaFileType[LEVELS[level].file_type]))

    def quantizer(_: Path, out: Path) -> list[Command]:
        [source] = Path(exact).rglob("*.gguf")
        return [[sys.executable, "-c", QUANTIZE, str(peer), source, out / "model.gguf", kind]]

    ours = Made(lambda model, out: [stage("gguf", model, out, f"type={level}")], "**/*.gguf")
    return Case(ours, {"llama_cpp": Made(quantizer, "*.gguf")} if peer else {}, "llama.cpp")


def torch_case(kind: str) -> Case:
    """A graph of PyTorch: the stage, and the lines of a tutorial."""
    suffix = {"torchscript": "pt", "torch_export": "pt2"}[kind]
    ours = Made(lambda model, out: [stage(kind, model, out)], f"**/model.{suffix}")
    by_hand = Made(
        lambda model, out: [[sys.executable, "-c", BY_HAND, kind, model, out / f"model.{suffix}"]], f"*.{suffix}"
    )
    return Case(ours, {"by_hand": by_hand}, kind)


def openvino_case(level: str, peer: Path | None) -> Case:
    """OpenVINO: the stages that such an export runs, and optimum-intel's command."""

    def ours(model: Path, out: Path) -> list[Command]:
        made: list[Command] = [stage("onnx_export", model, out / "graph", "optimization=basic", "parity=never")]
        graph = out / "graph" / "onnx"
        if level:
            size = f"group_size={GROUP}"
            rounded = ("format=onnx", f"level={level}", "check=false", *((size,) if level == "int4" else ()))
            made.append(stage("quantize", graph, out / "rounded", *rounded, given="model"))
            graph = out / "rounded" / "model"
        return [*made, stage("openvino", graph, out / "made", *((f"level={level}",) if level else ()), given="onnx")]

    def optimum(model: Path, out: Path) -> list[Command]:
        command = [str(peer and peer.with_name("optimum-cli")), "export", "openvino", "--model", model]
        rounding = ["--sym", "--ratio", "1.0", "--group-size", str(GROUP)] if level == "int4" else []
        task = ["--task", "text-generation-with-past", "--weight-format", level or "fp32", *rounding]
        return [[*command, *task, out]]

    peers = {"optimum_intel": Made(optimum, "openvino_model.xml")} if peer else {}
    return Case(Made(ours, "made/**/openvino_model.xml"), peers, "openvino")


def executorch_case(level: str, peer: Path | None) -> Case:
    """ExecuTorch: the stage, and the recipe for Qwen3 that ExecuTorch ships."""
    settings = [
        "base.model_class=qwen3_0_6b", "model.use_kv_cache=true", "model.use_sdpa_with_kv_cache=true", "model.dtype_override=fp32",
        f"export.max_seq_length={LENGTH}", f"export.max_context_length={LENGTH}", "backend.xnnpack.enabled=true",
        "backend.xnnpack.extended_ops=true", r'base.metadata="{\"get_bos_id\": 0, \"get_eos_ids\": [2]}"',
    ]  # fmt: skip
    if level != "none":
        settings += [f"quantization.qmode={level}", f"quantization.group_size={GROUP}"]

    def export_llm(model: Path, out: Path) -> list[Command]:
        named = [*settings, f"export.output_dir={out}", f"export.output_name={out}/model.pte"]
        return [[str(peer), "-c", EXPORT_LLM, model, out, json.dumps(named)]]

    params = (f"level={level}", f"max_length={LENGTH}", *(() if level == "none" else (f"group_size={GROUP}",)))
    ours = Made(lambda model, out: [stage("executorch", model, out, *params)], "**/model.pte")
    return Case(ours, {"export_llm": Made(export_llm, "model.pte")} if peer else {}, "executorch")


def adapter_case(adapter: Path) -> Case:
    """The adapter alone, which no other tool makes of a checkpoint."""

    def ours(model: Path, out: Path) -> list[Command]:
        command = list(stage("adapter", model, out, "target=peft", given="base"))
        return [[*command[:3], "--input", f"adapter={adapter}", *command[3:]]]

    return Case(Made(ours, "**/adapter_model.safetensors"))

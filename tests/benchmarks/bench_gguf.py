"""GGUF files beside llama.cpp's own quantizer: time, memory, and whether every tensor has the same type and bytes.

The quantizer needs a file with the weights as they are, which the stage makes too. Its libraries are in npm's package, without a compiler:
``npm pack @node-llama-cpp/linux-x64`` and ``tar xf``; give the folder ``package/bins/linux-x64`` as ``--peer``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from measure import measure

from slipway_gguf.levels import LEVELS

RESULTS = Path(__file__).parent / "results"

STAGE = """
import sys
from pathlib import Path
from slipway.machine.cgroup import usable_cores
from slipway.stage import Context
from slipway_gguf.stage import STAGE, GGUFParams
out = Path(sys.argv[2])
out.mkdir()
STAGE.run({"pytorch": Path(sys.argv[1])}, GGUFParams(type=sys.argv[3]), Context(workdir=out, threads=usable_cores()))
"""

PEER = """
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


def different(one: Path, other: Path) -> list[str]:
    """Return the names of tensors that have not the same type and bytes in both files."""
    first, second = ({each.name: each for each in gguf.GGUFReader(path).tensors} for path in (one, other))
    return sorted(
        name
        for name in first.keys() | second.keys()
        if name not in first
        or name not in second
        or first[name].tensor_type != second[name].tensor_type
        or not np.array_equal(first[name].data, second[name].data)
    )


def main() -> None:
    """Measure, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with a merged model")
    parser.add_argument("--peer", type=Path, required=True, help="folder with llama.cpp's libraries")
    parser.add_argument("--types", default="q8_0,q4_k_m")
    parser.add_argument(
        "--exact", default="bf16", help="type that holds the model's weights exactly, for the quantizer"
    )
    parser.add_argument("--folder", type=Path, help="where outputs go")
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        root = Path(made)
        stage = [sys.executable, "-c", STAGE, arguments.model]
        measured = {"exact_stage": measure([*stage, root / "exact", arguments.exact])}
        [source] = (root / "exact").rglob("*.gguf")
        for level in arguments.types.split(","):
            ours, theirs = root / level, root / f"{level}.gguf"
            kind = str(int(gguf.LlamaFileType[LEVELS[level].file_type]))
            measured[f"{level}_stage"] = measure([*stage, ours, level])
            measured[f"{level}_peer"] = measure([sys.executable, "-c", PEER, arguments.peer, source, theirs, kind])
            [file] = ours.rglob("*.gguf")
            found[f"{level}_different_tensors"] = len(different(file, theirs))
            shutil.rmtree(ours)
            theirs.unlink()
    for name, one in measured.items():
        found[f"{name}_seconds"] = one.seconds
        found[f"{name}_core_seconds"] = one.core_seconds
        found[f"{name}_peak_anonymous_mb"] = one.peak_anonymous_bytes / 1e6
    for name, value in found.items():
        print(f"{name:36} {value:10.3f}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gguf.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

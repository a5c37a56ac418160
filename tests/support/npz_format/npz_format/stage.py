"""The stage ``npz_pack``: pack safetensors into one numpy archive."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Stage, StageParams


class NpzParams(StageParams):
    compress: bool = False
    half: bool = False


def run(inputs: Mapping[str, Path], params: NpzParams, ctx: Context) -> dict[str, Path]:
    import numpy as np
    from safetensors.numpy import load_file

    out = ctx.workdir / "npz"
    out.mkdir()
    weights = {}
    for path in sorted(inputs["model"].iterdir()):
        if path.suffix == ".safetensors":
            weights |= load_file(path)
        else:
            shutil.copy(path, out / path.name)
    dtype = np.float16 if params.half else np.float32
    save = np.savez_compressed if params.compress else np.savez
    save(out / "weights.npz", **{name: value.astype(dtype) for name, value in sorted(weights.items())})
    (out / "npz.json").write_text(json.dumps({"precision": "fp16" if params.half else "fp32"}))
    return {"npz": out}


STAGE = Stage(
    name="npz_pack", version=1, inputs=("model",), outputs=("npz",), params=NpzParams, run=run, libraries=("numpy",)
)

"""Sessions of ONNX Runtime: on the CPU here, and falling back to it by name where CUDA is asked for and cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from slipway.machine import onnx_runtime
from slipway.machine.onnx_runtime import CPU, CUDA, ProviderChoice, open_session, runtime_provider
from slipway.machine.threads import session_options


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    made = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize(("choice", "told"), [("auto", False), ("cpu", False), ("cuda", True)])
def test_the_cpu_computes_where_no_gpu_can(graph: Path, choice: ProviderChoice, told: bool) -> None:
    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("this build has CUDA")
    opened = open_session(graph, session_options(1), provider=choice)
    assert opened.provider == CPU
    assert opened.session.run(None, {"x": np.ones(2, np.float32)})[0].tolist() == [-1, -1]
    assert ("no CUDA provider" in opened.note, "slipway[onnxruntime-gpu]" in opened.note) == (told, told)


def test_a_provider_that_does_not_load_is_told(graph: Path) -> None:
    """ONNX Runtime drops a provider whose libraries are missing, and refuses some graphs with it."""
    asked: list[Any] = []

    def without_libraries(providers: Sequence[Any]) -> Any:
        asked.extend(providers)
        return onnxruntime.InferenceSession(str(graph), providers=[CPU])

    def refusing(_: Sequence[Any]) -> Any:
        raise RuntimeError("CUDA failure 2:\nout of memory")

    dropped, refused = onnx_runtime._open_on_gpu(without_libraries), onnx_runtime._open_on_gpu(refusing)
    assert asked == [(CUDA, {"use_tf32": "0"}), CPU]
    assert (dropped.session, "CUDA provider does not load" in dropped.note) == (None, True)
    assert (refused.session, "CUDA failure 2: out of memory" in refused.note) == (None, True)


def test_the_doctor_says_what_the_build_computes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = runtime_provider()
    assert (found.available, found.version) == (True, onnxruntime.__version__)
    assert found.detail.startswith("computes on ")
    assert "overwrite each other" not in found.detail
    metadata = tmp_path / "onnxruntime_gpu-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "overwrite each other: pip uninstall" in runtime_provider().detail

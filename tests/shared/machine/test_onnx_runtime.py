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
from slipway.machine.onnx_runtime import (
    CPU,
    CUDA,
    FallingBack,
    Opened,
    ProviderChoice,
    open_session,
    runtime_provider,
)
from slipway.machine.processes import session_options


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
    assert ("no CUDA provider" in opened.note, "slipway-ml[onnxruntime-gpu]" in opened.note) == (told, told)


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


class Failing:
    """Stands for a session on a GPU, which this machine lacks: it loads, and its calls fail from some call on."""

    def __init__(self, path: Path, *, good: int) -> None:
        self._session, self._good = onnxruntime.InferenceSession(str(path), providers=[CPU]), good

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._session, name)
        return self._counted(found) if name.startswith("run") else found

    def _counted(self, run: Any) -> Any:
        def call(*args: Any) -> Any:
            self._good -= 1
            if self._good < 0:
                raise RuntimeError("CUDA failure 2: out of memory ;\n GPU=0")
            return run(*args)

        return call


@pytest.mark.parametrize("good", [0, 1, 3])
def test_a_call_that_fails_on_the_gpu_is_made_on_the_cpu(graph: Path, good: int) -> None:
    """And all later ones; provider and note say so from then on."""
    reopened: list[Path] = []

    def reopen() -> Any:
        reopened.append(graph)
        return onnxruntime.InferenceSession(str(graph), providers=[CPU])

    opened = Opened(FallingBack(Failing(graph, good=good), reopen), f"{CUDA}, {CPU}")
    for number in range(4):
        expected = f"{CUDA}, {CPU}" if number <= good - 1 else CPU
        x = np.full(2, number, np.float32)
        assert opened.session.run(None, {"x": x})[0].tolist() == [-number, -number]
        assert opened.provider == expected
        assert opened.note == (
            "" if expected != CPU else "CUDA fails while it computes: CUDA failure 2: out of memory ; GPU=0"
        )
    assert len(reopened) == 1


@pytest.mark.parametrize("good", [0, 1, 9])
def test_bound_values_are_bound_again_on_the_cpu(graph: Path, good: int) -> None:
    session = FallingBack(Failing(graph, good=good), lambda: onnxruntime.InferenceSession(str(graph), providers=[CPU]))
    for number in (1, 2):
        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.full(2, number, np.float32))
        place = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(2, np.float32))
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", value)
        if number == 1:
            binding.bind_ortvalue_output("y", place)
        else:
            binding.bind_output("y")
        session.run_with_iobinding(binding)
        (found,) = binding.get_outputs()
        assert found.numpy().tolist() == [-number, -number]
        assert number == 2 or place.numpy().tolist() == [-1, -1]
        (again,) = session.run_with_ort_values(["y"], {"x": value})
        assert again.numpy().tolist() == [-number, -number]


def test_a_fault_of_the_call_itself_is_still_one(graph: Path) -> None:
    session = FallingBack(Failing(graph, good=0), lambda: onnxruntime.InferenceSession(str(graph), providers=[CPU]))
    for _ in range(2):
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            session.run(None, {"x": np.ones((2, 2, 2), np.int64)})


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

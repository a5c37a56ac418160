"""Run a TensorRT (or TensorRT-RTX) engine on the GPU for which it was built."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from slipway.files.json_documents import read_object_or_empty
from slipway.machine.shortages import GPU_MEMORY, memory_shortage_in
from slipway.model.dtypes import DTYPES, torch_dtypes
from slipway.proof.numerics import Logits
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import PAST_PREFIX, PRESENT_PREFIX, Bounds, LanguageModel, NotRunnable, Past, Step, Unusable
from slipway.validation.speed import Engine

MODULES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt_rtx"}
"""Python module of each builder that ``engine.json`` may name."""
_MOST_ERRORS, _LONGEST_ERROR = 10, 500  # messages that are kept, and characters of each
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
"""``CUdevice_attribute`` values, cuda.h."""


def gpu_targets() -> tuple[str, ...]:
    """Return the architectures of this machine's GPUs (``sm89``) from the driver alone; empty without a driver or a GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_target(cuda, index) for index in range(count.value))


def _target(cuda: ctypes.CDLL, index: int) -> str:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), COMPUTE_CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), COMPUTE_CAPABILITY_MINOR, device)
    return f"sm{major.value}{minor.value}"


def choose_engine(folder: Path, targets: tuple[str, ...]) -> Path:
    """Choose the engine file for this machine's first GPU.

    Raises:
        NotRunnable: No GPU, or no engine for it.
    """
    engines = sorted(folder.glob("*.engine"))
    built = ", ".join(path.name for path in engines)
    if not targets:
        raise NotRunnable(
            f"{built}: this machine has no NVIDIA GPU (no CUDA driver was found); validate it on the target machine"
        )
    for path in engines:
        if f".{targets[0]}." in path.name:
            return path
    raise NotRunnable(
        f"{built}: built for another GPU than this machine's {targets[0]}; validate it on the target machine"
    )


class TensorRTModel(LanguageModel):
    """An engine of a decoder graph."""

    def __init__(self, library: ModuleType, torch: ModuleType, plan: Plan, *, stored: str) -> None:
        self._torch = torch
        self._plan = plan
        self._engine = engine = plan.engine
        self._context = engine.create_execution_context()
        if self._context is None:
            raise plan.failure("the engine cannot be prepared to run")
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        is_input = {name: engine.get_tensor_mode(name) == library.TensorIOMode.INPUT for name in names}
        self._inputs = [name for name in names if is_input[name]]
        self._outputs = [name for name in names if not is_input[name]]
        self._past = [name for name in self._inputs if name.startswith(PAST_PREFIX)]
        self._dtypes = {name: _torch_dtype(library, engine.get_tensor_dtype(name)) for name in names}
        if "input_ids" not in self._inputs or "logits" not in self._outputs:
            raise Unusable(
                f"inputs {self._inputs[:3]} and outputs {self._outputs[:3]} are not those of a decoder's engine"
            )
        self.has_cache = bool(self._past)
        batch, sequence = engine.get_tensor_profile_shape("input_ids", 0)[2]
        past = engine.get_tensor_profile_shape(self._past[0], 0)[2][2] if self._past else 0
        self.bounds = Bounds(batch=batch, sequence=sequence, past=past)
        self.device = torch.cuda.get_device_name(0)
        self.native_dtype = str(self._dtypes["logits"]).removeprefix("torch.")
        self.engine = Engine(
            runtime="tensorrt",
            version=f"{library.__name__} {library.__version__}",
            provider=self.device,
            stored_dtype=stored or self.native_dtype,
            compute_dtype=self.native_dtype,
            native_dtype=self.native_dtype,
        )

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        feeds = {"input_ids": step.input_ids, "attention_mask": step.attention_mask, "position_ids": step.position_ids}
        values = {name: self._to_device(name, feeds[name]) for name in self._inputs if name in feeds}
        values.update(self._past_values(step.past, batch=len(step.input_ids)))
        for name, value in values.items():
            if not self._context.set_input_shape(name, tuple(value.shape)):
                raise Unusable(f"the engine's profile does not accept {name} of shape {tuple(value.shape)}")
            self._context.set_tensor_address(name, _address(value))
        results = {name: self._allocate(name) for name in self._outputs}
        for name, value in results.items():
            self._context.set_tensor_address(name, _address(value))
        self._plan.errors.clear()  # those of an earlier call explain nothing of this one
        stream = self._torch.cuda.current_stream()
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise self._plan.failure("the engine refused to run this shape")
        stream.synchronize()
        logits: Logits = results.pop("logits").float().cpu().numpy()
        return logits, results if self.has_cache else None

    def peak_device_bytes(self) -> int | None:
        """Return the memory in use on the device now: tensors and the engine's own memory together."""
        free, total = self._torch.cuda.mem_get_info()
        return int(total - free)

    def _to_device(self, name: str, value: np.ndarray[Any, Any]) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(value)).to("cuda", self._dtypes[name])

    def _past_values(self, past: Past, *, batch: int) -> dict[str, Any]:
        if past is not None:
            return {name: past[PRESENT_PREFIX + name.removeprefix(PAST_PREFIX)] for name in self._past}
        return {name: self._empty(name, batch) for name in self._past}

    def _empty(self, name: str, batch: int) -> Any:
        _, heads, _, size = self._engine.get_tensor_shape(name)
        return self._torch.empty((batch, heads, 0, size), dtype=self._dtypes[name], device="cuda")

    def _allocate(self, name: str) -> Any:
        shape = tuple(self._context.get_tensor_shape(name))
        return self._torch.empty(shape, dtype=self._dtypes[name], device="cuda")


def _address(tensor: Any) -> int:
    """Return the device address; an empty tensor has none, and TensorRT refuses null, so it gets one that is never read."""
    return int(tensor.data_ptr()) or 256


def _torch_dtype(library: ModuleType, dtype: Any) -> Any:
    known = torch_dtypes("F32", "F16", "BF16", "I64", "I32", "BOOL")
    table = {getattr(library, DTYPES[name].torch): dtype for name, dtype in known.items()}
    if dtype not in table:
        raise Unusable(f"the engine has a tensor of the unsupported type {dtype}")
    return table[dtype]


def load(folder: Path, *, threads: int) -> TensorRTModel:  # noqa: ARG001 - the GPU does the work
    """Load an output.

    Raises:
        NotRunnable: No GPU, no library, or no engine for this GPU.
        Unusable: The engine cannot be deserialised.
    """
    path = choose_engine(folder, gpu_targets())
    description = read_object_or_empty(folder / "engine.json")
    builder = str(description.get("builder", "tensorrt"))
    name = MODULES.get(builder, builder)
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise NotRunnable(f"{path.name} needs {name}, which is not installed here: pip install {name}") from error
    import torch

    if not torch.cuda.is_available():
        raise NotRunnable(f"{path.name} needs a CUDA build of torch for its buffers; this one is {torch.__version__}")
    plan = deserialise(library, path, built_by=str(description.get("builder_version", "")))
    return TensorRTModel(library, torch, plan, stored=stored_dtype(folder))


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine that was loaded, and the errors that its library has logged."""

    engine: Any
    errors: list[str]

    def failure(self, what: str) -> Unusable:
        """Return the error of a call that failed, with what the library logged: the calls themselves say nothing."""
        return Unusable(f"{what}: {_shown(self.errors)}")


def deserialise(library: ModuleType, path: Path, *, built_by: str) -> Plan:
    """Load the engine in a file that version ``built_by`` of the library wrote.

    Raises:
        NotRunnable: It does not load, and the library here has another version: engines belong to one.
        Unusable: It does not load in the version that built it, or for lack of the GPU's memory.
    """
    errors: list[str] = []
    runtime = library.Runtime(_make_logger(library, errors))
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is not None:
        return Plan(engine, errors)
    here = f"{library.__name__} {library.__version__}"
    no_room = memory_shortage_in(_shown(errors)) is GPU_MEMORY
    if built_by and built_by != library.__version__ and not no_room:
        raise NotRunnable(
            f"{path.name} was built by {library.__name__} {built_by}, and {here}, which is here, does not load it: "
            f"install {built_by}"
        )
    raise Unusable(f"{here} cannot deserialise {path.name}: {_shown(errors)}")


def _make_logger(library: ModuleType, errors: list[str]) -> Any:
    """Return a logger that adds error messages to ``errors``. Its base class is the library's, so it is defined for each."""
    failures = (library.ILogger.Severity.INTERNAL_ERROR, library.ILogger.Severity.ERROR)

    class ErrorLogger(library.ILogger):  # type: ignore[misc,name-defined]
        def log(self, severity: Any, message: str) -> None:
            if severity in failures and len(errors) < _MOST_ERRORS:
                errors.append(" ".join(message.split())[:_LONGEST_ERROR])

    return ErrorLogger()


def _shown(errors: Sequence[str]) -> str:
    return "; ".join(errors) or "it gives no reason"

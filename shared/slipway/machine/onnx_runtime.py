"""ONNX Runtime on this machine: what its installed build can compute on, and sessions on the GPU that fall back to the CPU by name.

``onnxruntime`` and ``onnxruntime-gpu`` are two builds of one module, so an environment should have one of them only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from slipway.machine.gpu import first_gpu
from slipway.stage import Provider, installed_version, library_provider
from slipway.texts import one_line

ProviderChoice = Literal["auto", "cuda", "cpu"]
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
CPU_BUILD, GPU_BUILD = "onnxruntime", "onnxruntime-gpu"

_EXACT = {"use_tf32": "0"}
"""Products of float32 keep 24 bits: the provider rounds them to 11 by default, which no comparison with PyTorch passes."""
_CUDA_LIBRARY = "libonnxruntime_providers_cuda.so"
_REPLACE = "pip uninstall --yes onnxruntime onnxruntime-gpu, then pip install 'slipway[onnxruntime-gpu]'"


@dataclass(frozen=True, slots=True)
class Opened:
    """A session, and what it computes on.

    Attributes:
        session: The ``onnxruntime.InferenceSession``.
        provider: Its providers, first the one that computes whatever it can.
        note: Why the GPU is not used although it was asked for or is there; otherwise empty.
    """

    session: Any
    provider: str
    note: str = ""


def open_session(path: Path, options: Any, *, provider: ProviderChoice = "auto") -> Opened:
    """Load a graph: on the GPU if that is asked for, or if there is one and the build can use it; otherwise on the CPU.

    Args:
        path: The graph.
        options: The session's options.
        provider: ``auto``, ``cuda`` or ``cpu``. If CUDA does not load, the CPU computes, and the result's note says why.

    Raises:
        Exception: Those of ONNX Runtime, if the CPU cannot load the graph either.
    """
    import onnxruntime

    has = CUDA in onnxruntime.get_available_providers()
    note = ""
    if provider == "cuda" and not has:
        note = f"the installed onnxruntime {onnxruntime.__version__} has no CUDA provider: {_REPLACE}"
    elif provider == "cuda" or (provider == "auto" and has and first_gpu() is not None):
        opened = _open_on_gpu(lambda names: onnxruntime.InferenceSession(str(path), options, providers=names))
        if opened.session is not None:
            return opened
        note = opened.note
    session = onnxruntime.InferenceSession(str(path), options, providers=[CPU])
    return Opened(session, ", ".join(session.get_providers()), note)


def _open_on_gpu(make: Callable[[Sequence[Any]], Any]) -> Opened:
    """Make a session with CUDA; without a session if that is not possible, which the note explains."""
    import onnxruntime

    try:
        if hasattr(onnxruntime, "preload_dlls"):  # finds the CUDA libraries that PyTorch brings
            onnxruntime.preload_dlls()
        session = make([(CUDA, _EXACT), CPU])
    except Exception as error:  # noqa: BLE001 - the errors of ONNX Runtime have no common class; the CPU decides what is a fault
        return Opened(None, "", f"CUDA does not load the graph: {one_line(str(error))[:300]}")
    found = session.get_providers()
    if CUDA in found:
        return Opened(session, ", ".join(found))
    return Opened(
        None,
        "",
        "the CUDA provider does not load: a library of CUDA 13 or cuDNN 9, or the GPU's driver, is missing",
    )


def runtime_provider() -> Provider:
    """Describe the installed build for ``slipway doctor`` from its files, without importing it."""
    found = library_provider(CPU_BUILD)
    if not found.available:
        return found
    both = all(installed_version(name, alike=False) for name in (CPU_BUILD, GPU_BUILD))
    has = _has_cuda()
    detail = "computes on CUDA and CPU" if has else "computes on CPU"
    if both:
        detail += f"; {CPU_BUILD} and {GPU_BUILD} overwrite each other: {_REPLACE}"
    elif not has and first_gpu() is not None:
        detail += f"; to use the GPU: {_REPLACE}"
    elif has and first_gpu() is None:
        detail += "; CUDA needs an NVIDIA GPU and its driver, and none is visible here"
    return Provider(found.name, available=True, version=found.version, detail=detail)


def _has_cuda() -> bool:
    try:
        spec = find_spec("onnxruntime")
    except (ImportError, ValueError):  # a damaged installation
        return False
    places = spec.submodule_search_locations if spec is not None else None
    return any(Path(place, "capi", _CUDA_LIBRARY).is_file() for place in places or ())

"""ONNX Runtime on this machine: what its installed build can compute on, and sessions on the GPU that fall back to the CPU by name.

``onnxruntime`` and ``onnxruntime-gpu`` are two builds of one module, so an environment should have one of them only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from slipway.distribution import install_command, installed_version
from slipway.machine.processors import first_gpu
from slipway.stage import Provider, library_provider
from slipway.texts import one_line

ProviderChoice = Literal["auto", "cuda", "cpu"]
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
CPU_BUILD, GPU_BUILD = "onnxruntime", "onnxruntime-gpu"

_EXACT = {"use_tf32": "0"}
"""Products of float32 keep 24 bits: the provider rounds them to 11 by default, which no comparison with PyTorch passes."""
_CUDA_LIBRARY = "libonnxruntime_providers_cuda.so"
_REPLACE = f"pip uninstall --yes onnxruntime onnxruntime-gpu, then {install_command(GPU_BUILD)}"


@dataclass(frozen=True, slots=True)
class Opened:
    """A session, and what it computes on.

    Attributes:
        session: The ``onnxruntime.InferenceSession``, or one on the GPU that goes on with the CPU if a call fails there.
        chosen: Its providers, first the one that computes whatever it can.
        why: Why the GPU is not used although it was asked for or is there; otherwise empty.
    """

    session: Any
    chosen: str
    why: str = ""

    @property
    def provider(self) -> str:
        """Return the provider that computed the latest call."""
        return CPU if self._failed else self.chosen

    @property
    def note(self) -> str:
        """Return why it was not the GPU; empty if it was, or if the GPU is not wanted."""
        return self._failed or self.why

    @property
    def _failed(self) -> str:
        return self.session.failed if isinstance(self.session, FallingBack) else ""


class FallingBack:
    """A session on the GPU. If a call fails there, it and all later ones run on the CPU: memory of the GPU may be exhausted, or a kernel missing.

    Args:
        session: The session on the GPU.
        reopen: Function that opens the graph on the CPU.

    Attributes:
        failed: Why the CPU computes now; otherwise empty.
    """

    def __init__(self, session: Any, reopen: Callable[[], Any]) -> None:
        self._session, self._reopen, self.failed = session, reopen, ""
        if hasattr(session, "disable_fallback"):
            session.disable_fallback()  # its own is silent, and covers only some of the calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, *args: Any) -> Any:
        """Run the graph on arrays."""
        return self._call(lambda session: session.run(*args))

    def run_with_ort_values(self, *args: Any) -> Any:
        """Run the graph on values of ONNX Runtime."""
        return self._call(lambda session: session.run_with_ort_values(*args))

    def io_binding(self) -> _Bindings:
        """Return places for inputs and outputs, which can be bound to the other session too."""
        return _Bindings(self._session.io_binding())

    def run_with_iobinding(self, bound: _Bindings) -> None:
        """Run the graph with places for inputs and outputs."""
        self._call(lambda session: session.run_with_iobinding(bound.to(session)))

    def _call(self, run: Callable[[Any], Any]) -> Any:
        try:
            return run(self._session)
        except Exception as error:
            if self.failed:
                raise
            self._session, self.failed = self._reopen(), f"CUDA fails while it computes: {one_line(str(error))[:300]}"
            return run(self._session)


class _Bindings:
    """Bindings that are made again for another session."""

    def __init__(self, binding: Any) -> None:
        self._binding = binding
        self._made: list[tuple[str, tuple[Any, ...]]] = []
        self._owner: Any = None

    def bind_ortvalue_input(self, *args: Any) -> None:
        self._bind("bind_ortvalue_input", args)

    def bind_ortvalue_output(self, *args: Any) -> None:
        self._bind("bind_ortvalue_output", args)

    def bind_output(self, *args: Any) -> None:
        self._bind("bind_output", args)

    def get_outputs(self) -> Any:
        return self._binding.get_outputs()

    def _bind(self, kind: str, args: tuple[Any, ...]) -> None:
        self._made.append((kind, args))
        getattr(self._binding, kind)(*args)

    def to(self, session: Any) -> Any:
        """Return the bindings for a session; make them again for any session but the first."""
        if self._owner is None:
            self._owner = session
        if session is not self._owner:
            self._owner, self._binding = session, session.io_binding()
            for kind, args in self._made:
                getattr(self._binding, kind)(*args)
        return self._binding


def open_session(path: Path, options: Any, *, provider: ProviderChoice = "auto") -> Opened:
    """Load a graph: on the GPU if that is asked for, or if there is one and the build can use it; otherwise on the CPU.

    Args:
        path: The graph.
        options: The session's options.
        provider: ``auto``, ``cuda`` or ``cpu``. If CUDA does not load, or fails in a call, the CPU computes, and the result's note says why.

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
            reopened = FallingBack(
                opened.session, lambda: onnxruntime.InferenceSession(str(path), options, providers=[CPU])
            )
            return replace(opened, session=reopened)
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
    providers = session.get_providers()
    if CUDA in providers:
        return Opened(session, ", ".join(providers))
    return Opened(
        None,
        "",
        "the CUDA provider does not load: a library of CUDA 13 or cuDNN 9, or the GPU's driver, is missing",
    )


def runtime_provider() -> Provider:
    """Describe the installed build for ``slipway doctor`` from its files, without importing it."""
    build = library_provider(CPU_BUILD)
    if not build.available:
        return build
    both = all(installed_version(name, alike=False) for name in (CPU_BUILD, GPU_BUILD))
    has = _has_cuda()
    detail = "computes on CUDA and CPU" if has else "computes on CPU"
    if both:
        detail += f"; {CPU_BUILD} and {GPU_BUILD} overwrite each other: {_REPLACE}"
    elif not has and first_gpu() is not None:
        detail += f"; to use the GPU: {_REPLACE}"
    elif has and first_gpu() is None:
        detail += "; CUDA needs an NVIDIA GPU and its driver, and none is visible here"
    return Provider(build.name, available=True, version=build.version, detail=detail)


def _has_cuda() -> bool:
    try:
        spec = find_spec("onnxruntime")
    except (ImportError, ValueError):  # a damaged installation
        return False
    places = spec.submodule_search_locations if spec is not None else None
    return any(Path(place, "capi", _CUDA_LIBRARY).is_file() for place in places or ())

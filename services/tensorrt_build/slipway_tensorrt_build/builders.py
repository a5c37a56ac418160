"""Choose TensorRT, which needs the GPU that it builds for, or TensorRT-RTX, which builds ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slipway.distribution import install_command, installed_version
from slipway.errors import TensorRTBuildError
from slipway.machine.processors import Gpu, all_gpus
from slipway.stage import Provider

if TYPE_CHECKING:
    from slipway_tensorrt_build.params import TensorRTBuildParams


# The targets of TensorRT-RTX 1.7; it has no names for the data-centre architectures sm90, sm100 and sm103.
RTX_TARGETS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")

_INSTALL_RTX = f"{install_command('tensorrt_build')} brings tensorrt-rtx on Linux x86-64, which builds without a GPU"
_INSTALL_TENSORRT = f"{install_command('tensorrt')} on a machine with an NVIDIA GPU and its driver"


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs and builders of a machine. The version of a library that is not installed is empty."""

    gpus: tuple[Gpu, ...]
    tensorrt: str
    tensorrt_rtx: str

    @property
    def own_targets(self) -> tuple[str, ...]:
        """Return the architectures of the GPUs present, each once."""
        return tuple(dict.fromkeys(gpu.architecture for gpu in self.gpus))


@dataclass(frozen=True, slots=True)
class Choice:
    """The library to import, its version, and the targets to build for."""

    library: Literal["tensorrt", "tensorrt_rtx"]
    version: str
    targets: tuple[str, ...]


def find_machine() -> Machine:
    """Return this machine's GPUs and builders, without importing the builders."""
    return Machine(
        gpus=all_gpus(), tensorrt=installed_version("tensorrt"), tensorrt_rtx=installed_version("tensorrt-rtx")
    )


def choose(params: TensorRTBuildParams, machine: Machine) -> Choice:
    """Return the builder for ``params`` on ``machine``.

    Raises:
        TensorRTBuildError: ``UNSUPPORTED`` if neither library can run or no target is known,
            ``TENSORRT_TARGET_UNSUPPORTED`` if the chosen library does not build for a target.
    """
    on_gpu = bool(machine.tensorrt and machine.gpus) and set(params.targets) <= set(machine.own_targets[:1])
    if params.builder == "tensorrt" or (params.builder == "auto" and on_gpu):
        return _choose_tensorrt(params, machine)
    return _choose_rtx(params, machine)


def probe() -> tuple[Provider, ...]:
    """Return both libraries as ``slipway doctor`` shows them."""
    machine = find_machine()
    gpus = ", ".join(f"{gpu.name} ({gpu.architecture})" for gpu in machine.gpus)
    if machine.tensorrt:
        detail = f"builds for {gpus}" if gpus else "needs an NVIDIA GPU and its driver; none is visible here"
    else:
        detail = _INSTALL_TENSORRT
    rtx = f"builds ahead of time for {', '.join(RTX_TARGETS)}" if machine.tensorrt_rtx else _INSTALL_RTX
    return (
        Provider("tensorrt", available=bool(machine.tensorrt and gpus), version=machine.tensorrt, detail=detail),
        Provider("tensorrt-rtx", available=bool(machine.tensorrt_rtx), version=machine.tensorrt_rtx, detail=rtx),
    )


def _choose_tensorrt(params: TensorRTBuildParams, machine: Machine) -> Choice:
    missing = [] if machine.tensorrt else ["tensorrt is not installed"]
    missing += [] if machine.gpus else ["no NVIDIA GPU is visible"]
    if missing:
        raise TensorRTBuildError(
            f"tensorrt cannot build here: {' and '.join(missing)}",
            reason="UNSUPPORTED",
            remedy=f"{_INSTALL_TENSORRT}; or {_INSTALL_RTX}: leave builder at auto and name targets, for example [sm89]",
            about={"builder": "tensorrt"},
        )
    own = machine.own_targets[:1]  # it builds on the first device
    if foreign := [target for target in params.targets if target not in own]:
        raise TensorRTBuildError(
            f"tensorrt builds only for this machine's GPU, {own[0]} ({machine.gpus[0].name}), not for {', '.join(foreign)}",
            reason="TENSORRT_TARGET_UNSUPPORTED",
            remedy="build on a machine with that GPU, or set builder to tensorrt_rtx",
            about={"builder": "tensorrt", "targets": ",".join(foreign)},
        )
    return Choice(library="tensorrt", version=machine.tensorrt, targets=own)


def _choose_rtx(params: TensorRTBuildParams, machine: Machine) -> Choice:
    if not machine.tensorrt_rtx:
        raise TensorRTBuildError(
            "no TensorRT can build here: tensorrt-rtx is not installed"
            + ("" if machine.tensorrt and machine.gpus else ", and tensorrt needs an NVIDIA GPU"),
            reason="UNSUPPORTED",
            remedy=f"{_INSTALL_RTX}; or {_INSTALL_TENSORRT}",
            about={"builder": "tensorrt_rtx"},
        )
    targets = params.targets or machine.own_targets
    if not targets:
        raise TensorRTBuildError(
            "no target is named, and this machine has no NVIDIA GPU to build for",
            reason="UNSUPPORTED",
            remedy=f"name the GPU architectures to build for, for example targets: [sm89]; one of {', '.join(RTX_TARGETS)}",
            about={"builder": "tensorrt_rtx", "targets": ""},
        )
    if params.refit and (foreign := [target for target in targets if target not in machine.own_targets[:1]]):
        raise TensorRTBuildError(
            f"TensorRT-RTX builds engines that can be refitted only where their GPU is, and {', '.join(foreign)} is not here",
            reason="UNSUPPORTED",
            remedy="build on a machine with that GPU, or set refit to false",
            about={"builder": "tensorrt_rtx", "targets": ",".join(foreign)},
        )
    for target in targets:
        if target not in RTX_TARGETS:
            raise TensorRTBuildError(
                f"TensorRT-RTX {machine.tensorrt_rtx} does not build for {target}: it supports GeForce, RTX and "
                f"workstation GPUs, {', '.join(RTX_TARGETS)}",
                reason="TENSORRT_TARGET_UNSUPPORTED",
                remedy="choose one of these; data-centre GPUs such as sm90 need tensorrt itself, on that GPU",
                about={"builder": "tensorrt_rtx", "targets": target},
            )
    return Choice(library="tensorrt_rtx", version=machine.tensorrt_rtx, targets=targets)

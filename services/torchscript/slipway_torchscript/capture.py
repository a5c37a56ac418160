"""Make programs: capture a module by torch.export with dynamic shapes, and compile it ahead of time."""

from __future__ import annotations

import importlib
import logging
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slipway.errors import TorchGraphError
from slipway.machine.processes import set_variable
from slipway_torchscript.interface import Interface, Tensors
from slipway_torchscript.tracing import graph_error

symbols: Any = importlib.import_module("torch.fx.experimental._config")
"""Settings of torch.export's sizes. torch adds the module's methods on import, so type checkers do not know them."""
COMPILERS = ("g++", "clang++", "c++")
MOST_ROWS, MOST_TOKENS = 1 << 16, 1 << 20
_DATA = re.compile(r"data-dependent|control flow|GuardOnDataDependent", re.I)
_AXIS = re.compile(r"Constraints violated|specialized|Not all values of", re.I)
_SIZE = r"L\['\w+'\](?:\[\d+\])?\.size\(\)\[\d+\]"
_ONE = re.compile(rf"\(?{_SIZE}(?: [+*] {_SIZE}|\*{_SIZE})*\)? (?:!= 1|> 1)")
_INDUCTOR = {"cpp_cache_precompile_headers": False}
"""Precompiled headers would outlive the attempt, and cost more time than they save for a model's few files."""
_LONGEST_MESSAGE = 400


def capture_module(interface: Interface, sample: Tensors, positions: int) -> Any:
    """Capture a module as an exported program whose batch, sequence and past vary.

    Raises:
        TorchGraphError: ``DYNAMIC_SHAPE`` if an axis would be fixed or the code branches on values, ``TORCH_GRAPH_FAILED``.
    """
    if interface.cache:  # the file stores the sample; computed keys and values would vary with the number of threads
        *others, past = sample
        sample = (*others, [torch.zeros_like(each) for each in past])
    try:
        # Without this, torch.export assumes that every axis is above 1.
        with symbols.patch(backed_size_oblivious=True), torch.no_grad(), _quiet():
            program = torch.export.export(
                interface.module, sample, dynamic_shapes=_shapes(interface, sample, positions), strict=False
            )
    except Exception as error:  # torch.export lets any exception of the model's or its own code through
        said = " ".join(str(error).split())
        if match := _DATA.search(said) or _AXIS.search(said):
            values = match.re is _DATA
            raise TorchGraphError(
                f"{'the code branches on values' if values else 'an axis would be fixed'}: {said[:_LONGEST_MESSAGE]}",
                reason="DYNAMIC_SHAPE",
                remedy="use TorchScript or ONNX for this model, and leave this format out",
                about={"kind": "data" if values else "axis", "architecture": type(interface.module).__name__},
            ) from error
        raise graph_error(interface.module, "export", error) from error
    # Conditions on an axis of size 1 only choose kernels, and each kernel computes any size: the comparison runs calls in which batch,
    # sequence, past or all of them are 1. The program keeps all other conditions, and refuses calls that break them.
    program._guards_code = [guard for guard in program._guards_code if not is_condition_on_one(guard)]
    return program


def is_condition_on_one(guard: str) -> bool:
    """Return whether a condition of the capture says that an input's axis, or a sum or product of several, is not 1."""
    return _ONE.fullmatch(guard) is not None


def _shapes(interface: Interface, sample: Tensors, positions: int) -> tuple[Any, ...]:
    """Return the dynamic axes of every input."""
    longest = min(positions, MOST_TOKENS)
    rows: Any = None if interface.one_row else torch.export.Dim("batch", min=1, max=MOST_ROWS)
    tokens = torch.export.Dim("sequence", min=1, max=longest)
    if not interface.cache:
        return ({0: rows, 1: tokens},) * len(sample)
    past = torch.export.Dim("past", min=0, max=longest)
    total = torch.export.Dim.DYNAMIC  # past + sequence: torch.export infers it
    return {0: rows, 1: tokens}, {0: rows, 1: total}, {0: rows, 1: tokens}, [{0: rows, 2: past}] * len(interface.cache)


def save(program: Any, path: Path) -> None:
    """Write a program's file."""
    with _quiet():
        torch.export.save(program, path)


def compiler() -> str:
    """Return the C++ compiler that AOTInductor would call; empty if there is none."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), "")


def compile_ahead(program: Any, path: Path, scratch: Path) -> None:
    """Write the compiled program as a package that ``torch._inductor.aoti_load_package`` loads.

    Raises:
        TorchGraphError: ``TORCH_GRAPH_FAILED`` if it cannot be compiled.
    """
    from torch._inductor import aoti_compile_and_package

    try:
        # Inductor takes the folder of its generated files only from this variable.
        with set_variable("TORCHINDUCTOR_CACHE_DIR", str(scratch)), torch.no_grad(), _quiet():
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=_INDUCTOR)
    except Exception as error:  # the compiler raises errors of any class
        raise graph_error(program.graph_module, "compile", error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

"""Translate the exceptions of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from slipway.machine.shortages import is_out_of_memory

# onnxruntime's exceptions have no common base class but Exception.
ORT_ERRORS = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoModel,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


@contextmanager
def translate_ort_errors(translate: Callable[[Exception], Exception]) -> Iterator[None]:
    """Translate exceptions of ONNX Runtime by ``translate``. A lack of memory passes as it is, because no graph is at fault."""
    try:
        yield
    except ORT_ERRORS as error:
        if is_out_of_memory(error):
            raise
        raise translate(error) from error

"""The exceptions of ONNX Runtime."""

from __future__ import annotations

from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

# onnxruntime's exceptions have no common base class but Exception.
ORT_ERRORS = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)

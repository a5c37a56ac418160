"""Import OpenVINO without telemetry: a plain ``import openvino`` reports the use to its maker.

Every module here imports the library from this one. Without the telemetry package, OpenVINO uses a stand-in that sends nothing.
"""

from __future__ import annotations

import sys

__all__ = ["apply_make_stateful_transformation", "error_summary", "ops", "ov"]
_LONGEST_MESSAGE = 600

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None refuses an import

import openvino as ov  # noqa: E402
from openvino import opset13 as ops  # noqa: E402
from openvino._offline_transformations import apply_make_stateful_transformation  # noqa: E402

from slipway.texts import one_line, shortened  # noqa: E402


def error_summary(error: Exception) -> str:
    """Join the error's lines; drop those that cite .cpp files."""
    return shortened(
        one_line("\n".join(line for line in str(error).splitlines() if ".cpp:" not in line)), _LONGEST_MESSAGE
    )

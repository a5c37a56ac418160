"""Import OpenVINO, and nothing that reports its use: ``import openvino`` alone sends an event to its maker.

Every module here gets the library from this one. Without the package for telemetry, OpenVINO uses a stand-in that sends nothing.
"""

from __future__ import annotations

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None refuses an import

import openvino as ov  # noqa: E402
from openvino import opset13 as ops  # noqa: E402
from openvino._offline_transformations import apply_make_stateful_transformation  # noqa: E402

from slipway.texts import one_line, shortened  # noqa: E402

__all__ = ["apply_make_stateful_transformation", "ops", "ov", "said"]
_LONGEST_MESSAGE = 600


def said(error: Exception) -> str:
    """Return the lines of an error of the library that name no file of its sources, as one."""
    return shortened(
        one_line("\n".join(line for line in str(error).splitlines() if ".cpp:" not in line)), _LONGEST_MESSAGE
    )

"""Import OpenVINO, and nothing that reports its use: ``import openvino`` alone sends an event to its maker.

Every module here gets the library from this one. Without the package for telemetry, OpenVINO uses a stand-in that sends nothing.
"""

from __future__ import annotations

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None refuses an import

import openvino as ov  # noqa: E402
from openvino import opset13 as ops  # noqa: E402
from openvino._offline_transformations import apply_make_stateful_transformation  # noqa: E402

__all__ = ["apply_make_stateful_transformation", "ops", "ov"]

"""Read settings of a ``config.json`` that nobody has checked."""

from __future__ import annotations

from slipway.errors import TensorRTLLMExportError
from slipway.model.config.values import ConfigValues

VALUES = ConfigValues(TensorRTLLMExportError)
positive, flag = VALUES.positive, VALUES.flag


def unsupported(what: str, *, key: str = "") -> TensorRTLLMExportError:
    """Return the error for a model that TensorRT-LLM would compute wrong."""
    return TensorRTLLMExportError(
        what,
        reason="FAMILY_UNSUPPORTED",
        remedy="leave the format out: current releases of TensorRT-LLM load the pytorch folder",
        about={"key": key} if key else {},
    )

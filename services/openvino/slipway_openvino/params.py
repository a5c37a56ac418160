"""Parameters of the openvino stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.stage import StageParams

Level = Literal["", "fp16", "int8", "int4"]


class OpenVinoParams(StageParams):
    """Parameters of the openvino stage."""

    level: Level = Field(
        default="",
        description="fp16 stores weights in half precision; int8 and int4 say that the graph's weights are integers already",
    )
    tokenizer: bool = Field(default=True, description="also convert the tokenizer, for openvino-genai")

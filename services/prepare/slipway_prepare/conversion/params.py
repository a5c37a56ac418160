"""Parameters of the conversion."""

from __future__ import annotations

from pydantic import Field

from slipway.stage import StageParams


class ConvertParams(StageParams):
    """Parameters of the conversion."""

    file: str = Field(default="", description="The only file to convert; empty converts every model below the source")
    key: str = Field(default="", description="Entry of a pickle that holds the weights; empty finds the only one")

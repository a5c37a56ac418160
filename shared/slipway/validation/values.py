"""Base of the plain data in reports."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """Frozen plain data; keys of a newer version are ignored, so an older reader can show a newer report."""

    model_config = ConfigDict(frozen=True, extra="ignore")

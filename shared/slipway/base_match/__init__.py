"""Whether the base model in use is the one the adapter was trained on: from files before the export, from validation after it."""

from slipway.base_match.match import BaseMatch, BaseMatchStatus
from slipway.base_match.measurement import joined

__all__ = ["BaseMatch", "BaseMatchStatus", "joined"]

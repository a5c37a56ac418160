"""Decide whether the base model in use is the one the adapter was trained on: by files before the export, by validation after it."""

from slipway.base_match.match import BaseMatch, BaseMatchStatus, joined

__all__ = ["BaseMatch", "BaseMatchStatus", "joined"]

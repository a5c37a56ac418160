"""The settings of this machine and process, read once from the environment."""

from slipway.settings.machine import Settings

__all__ = ["Settings"]

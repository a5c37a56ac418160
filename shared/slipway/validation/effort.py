"""How much evidence a validation gathers."""

from __future__ import annotations

from typing import Literal

Effort = Literal["quick", "standard", "thorough"]
"""``standard`` is the full evidence; ``quick`` leaves some of it out, ``thorough`` adds to it."""

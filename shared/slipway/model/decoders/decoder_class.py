"""What is said of a class of decoders: the defaults of its code, and which layers have a sliding window. Light."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Windowed(Enum):
    """When layers of a class look back no further than ``sliding_window``."""

    NEVER = "never, whatever a configuration says"
    ASKED = "if use_sliding_window is true"
    ALWAYS = "if sliding_window is set"


class Local(Enum):
    """Which layers have the window, if a model has one and no ``layer_types`` says it."""

    ALL = "all, whatever layer_types says"
    PERIOD = "all but every layer of a period"
    PERIOD_AND_LAST = "all but every layer of a period and the last layer"
    LAST = "those from max_window_layers on"
    FIRST_ODD = "the first, third and so on, below max_window_layers"
    UNROTATED = "those without a rotary embedding"


@dataclass(frozen=True, slots=True)
class DecoderClass:
    """A class of transformers.

    Attributes:
        name: Its name.
        defaults: Values that it has for settings that ``config.json`` may leave out.
        windowed: When its layers have a sliding window.
        local: Which of them have it.
        period: Period of the layers with full attention, where that is the rule; otherwise 0.
        norm_offset: Number that it adds to the weights of its norms.
        transposed: Whether its matrices are stored as (in, out).
        names: Usual names of settings that have another one in this class, by that name.
        kv_heads: Returns the number of heads of keys and values, for classes without a setting that says it; None if all heads have their own.
        positions: Most tokens of a text, for classes without a limit and with no setting that says what they were trained on; otherwise 0.
        attends: Whether any layer has attention.
        width: Setting with the width of a head, as far as the rotary embedding sees it.
        turned: Setting with the number of values of a head that turn, which files of the class may have instead of their share.
        by_layer: Whether ``layer_types`` says more than which layers have a window, such as which of them are recurrent.
    """

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    windowed: Windowed = Windowed.NEVER
    local: Local = Local.ALL
    period: int = 0
    norm_offset: float = 0.0
    transposed: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    kv_heads: Callable[[Mapping[str, Any]], Any] | None = None
    positions: int = 0
    attends: bool = True
    width: str = "head_dim"
    turned: str = ""
    by_layer: bool = False

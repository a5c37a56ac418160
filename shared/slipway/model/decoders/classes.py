"""All classes of decoders in transformers of which more is known than their ``config.json`` says. Light.

A new class is one entry in the table that it belongs to, by its layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipway.model.decoders.decoder_class import DecoderClass
from slipway.model.decoders.dense import DENSE
from slipway.model.decoders.gemma import GEMMA
from slipway.model.decoders.mixtures import MIXTURES
from slipway.model.decoders.recurrent import RECURRENT

CLASSES: Mapping[str, DecoderClass] = {each.name: each for each in (*DENSE, *GEMMA, *MIXTURES, *RECURRENT)}
"""By name."""

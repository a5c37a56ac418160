"""Make random sound for speech models: tones that rise and fall over noise, through the model's own feature extractor.

Like features of real sound, these contain silence, tones and noise. They contain no speech, so a model's transcription has no
meaning, and only the difference of two models is examined.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipway.model.families import SHORTEST_SOUND
from slipway.proof.runtime import Unusable

TONES = 4
LOWEST, HIGHEST = 100.0, 3500.0
"""Range of the tones in Hz, which covers most of speech."""
SECONDS, LONGEST_SECONDS = 10, 30
"""Seconds of made sound, and the most of a user's, for a feature extractor without its own length."""
MOST_RATE, MOST_SECONDS = 192_000, 60
"""The most samples per second, and the longest sound, that a feature extractor may ask for."""


def make_features(model: Path, *, count: int, seed: int) -> npt.NDArray[np.float32]:
    """Make features of ``count`` sounds, (count, F, frames), or their samples, (count, S).

    Raises:
        Unusable: The folder has no feature extractor that transformers can load, or it asks for impossible sound.
    """
    extractor = SoundFeatures(model)
    draw = np.random.default_rng(seed)
    return extractor.features([_sound(draw, length=extractor.length, rate=extractor.rate) for _ in range(count)])


class SoundFeatures:
    """The feature extractor of a model folder.

    Attributes:
        rate: Samples per second of its sound.
        length: Samples of a sound that is made for it: as many as it takes whole, if it has such a length.
        longest: Most samples of a user's sound.
        shortest: Fewest samples of a user's sound; an extractor with a length of its own fills up shorter ones.

    Raises:
        Unusable: The folder has none that transformers can load, or it asks for impossible sound.
    """

    def __init__(self, model: Path) -> None:
        self._name, self._extractor = model.name, _extractor(model)
        rate = self._extractor.sampling_rate
        if not isinstance(rate, int) or not 0 < rate <= MOST_RATE:
            raise Unusable(f"preprocessor_config.json in {model.name!r} has the sampling_rate {rate!r}")
        length = getattr(self._extractor, "n_samples", None) or SECONDS * rate
        if not isinstance(length, int) or not 0 < length <= MOST_SECONDS * rate:
            raise Unusable(f"the feature extractor of {model.name!r} takes {length!r} samples of sound at {rate} Hz")
        self.rate, self.length = rate, length
        whole = getattr(self._extractor, "n_samples", None)
        self.longest, self.shortest = (length, 1) if whole else (LONGEST_SECONDS * rate, SHORTEST_SOUND)

    def features(self, sounds: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        """Return the features of sounds of one length, (sounds, F, frames), or their samples, (sounds, S)."""
        extractor = self._extractor
        try:
            features = extractor(sounds, sampling_rate=self.rate, return_tensors="np")[extractor.model_input_names[0]]
        except (ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
            raise Unusable(f"the feature extractor of {self._name!r} does not accept sound: {error}") from error
        values: npt.NDArray[np.float32] = np.asarray(features, dtype=np.float32)
        return values


def _extractor(model: Path) -> Any:
    import transformers

    try:
        return transformers.AutoFeatureExtractor.from_pretrained(
            str(model), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise Unusable(
            f"transformers cannot load the feature extractor (preprocessor_config.json) in {model.name!r}: {error}"
        ) from error


def _sound(draw: np.random.Generator, *, length: int, rate: int) -> npt.NDArray[np.float32]:
    """Make tones with changing pitch and loudness over noise; (length,) within -1 and 1."""
    seconds = np.arange(length) / rate
    sound = 0.02 * draw.standard_normal(length)
    for _ in range(TONES):
        first, last = draw.uniform(LOWEST, HIGHEST, size=2)
        pitch = np.linspace(first, last, length)
        loudness = np.clip(np.sin(2 * np.pi * draw.uniform(0.3, 3) * seconds + draw.uniform(0, 6)), 0, None)
        sound += 0.2 * loudness * np.sin(2 * np.pi * np.cumsum(pitch) / rate)
    return np.clip(sound, -1, 1).astype(np.float32)

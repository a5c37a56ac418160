"""Read the sound files of test inputs: WAV of whole numbers, at the rate and of at most the length that the model takes."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipway.files.regular_file import read_regular
from slipway.validation.inputs import LARGEST_SOUND

MOST_CHANNELS = 8
_CONVERT = "convert it: ffmpeg -i FILE -ac 1 -ar {rate} -c:a pcm_s16le NEW.wav"


class UnusableSoundError(Exception):
    """A sound file cannot be given to the model; the message says why and what helps."""


def read_sound(path: Path, *, rate: int, longest: int) -> npt.NDArray[np.float32]:
    """Return the samples of a file as one channel within -1 and 1: the mean of its channels.

    Args:
        path: The file.
        rate: Samples per second that the model takes; a file of another rate is refused.
        longest: Most samples.

    Raises:
        UnusableSoundError: It is no such file, or its header says other than it holds.
    """
    convert = _CONVERT.format(rate=rate)
    try:
        with wave.open(io.BytesIO(read_regular(path, largest=LARGEST_SOUND)), "rb") as file:
            channels, width, found, count, *_ = file.getparams()
            if not 0 < channels <= MOST_CHANNELS or not 0 < width <= 4 or found != rate:
                said = f"{channels} channels of {8 * width} bits at {found} Hz"
                raise UnusableSoundError(f"it has {said}, the model takes {rate} Hz; {convert}")
            if not 0 < count <= longest:
                said = f"{count / rate:.1f} s, the model takes at most {longest / rate:.0f} s"
                raise UnusableSoundError(f"it has {said}; cut it into parts of whole sentences")
            data = file.readframes(count)
    except (OSError, EOFError, ValueError, wave.Error) as error:
        raise UnusableSoundError(f"it cannot be read as WAV: {str(error) or 'it ends early'}; {convert}") from error
    if len(data) != count * channels * width:
        raise UnusableSoundError(f"its header has {count} frames and the file ends before; {convert}")
    return _numbers(data, width).reshape(count, channels).mean(axis=1, dtype=np.float64).astype(np.float32)


def _numbers(data: bytes, width: int) -> npt.NDArray[np.float64]:
    """Return whole numbers of a width in bytes as fractions of the largest; those of one byte have no sign."""
    if width == 1:
        return (np.frombuffer(data, dtype=np.uint8).astype(np.float64) - 128) / 128
    wide = np.zeros((len(data) // width, 4), dtype=np.uint8)
    wide[:, 4 - width :] = np.frombuffer(data, dtype=np.uint8).reshape(-1, width)
    return wide.view("<i4")[:, 0].astype(np.float64) / (1 << 31)

"""Keep the times that TensorRT measured for its kernels on a GPU, so that the next engine for this GPU takes less time to build.

Only TensorRT measures. TensorRT-RTX builds without a GPU, and its functions for timing caches do nothing (version 1.7).
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from slipway.files.regular_file import read_regular
from slipway.stage import Context
from slipway_tensorrt_build.builders import Choice, Gpu

_LARGEST = 256 << 20
"""Most bytes of a file; caches of large models have some megabytes."""
_ENDING = ".timings"


class Timings:
    """The times of one GPU and one version of TensorRT; they hold for every model.

    Args:
        choice: The builder.
        gpu: The GPU that it builds on; None without one.
        ctx: Context of the stage. :attr:`~slipway.stage.Context.kept` has the file; without that folder, nothing is kept.
    """

    def __init__(self, choice: Choice, gpu: Gpu | None, ctx: Context) -> None:
        self._ctx, self._file = ctx, None
        self.reused = False
        if choice.library == "tensorrt" and gpu is not None and ctx.kept is not None:
            self._file = ctx.kept / (
                re.sub(r"[^A-Za-z0-9.]+", "_", f"{gpu.name}-{gpu.target}-{choice.version}") + _ENDING
            )

    def give(self, config: Any) -> None:
        """Give a builder the known times. TensorRT measures again if it refuses them, such as those of another driver."""
        if self._file is None:
            return
        data = b""
        with contextlib.suppress(OSError):
            data = b"" if self._file.is_symlink() else read_regular(self._file, largest=_LARGEST)
        self.reused = bool(data) and bool(config.set_timing_cache(config.create_timing_cache(data), False))
        if not self.reused:
            if data:
                self._ctx.log.info(f"TensorRT does not take the times in {self._file.name}: all kernels are measured")
            config.set_timing_cache(config.create_timing_cache(b""), False)

    def keep(self, config: Any) -> None:
        """Keep the builder's times after a build. If the disk is full, only the times are lost."""
        cache = config.get_timing_cache() if self._file is not None else None
        if self._file is None or cache is None:
            return
        unfinished = self._file.with_suffix(".unfinished")
        try:
            unfinished.write_bytes(cache.serialize())
            unfinished.replace(self._file)
        except OSError as error:
            self._ctx.log.info(f"the times of kernels are not kept: {error}")

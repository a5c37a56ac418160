"""Memory and power of the GPU while a block runs, as NVIDIA's management library (NVML) reads them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Self

INTERVAL = 0.01
"""Seconds between two readings; NVML averages power over 25 ms or more by itself."""


@dataclass
class Meter:
    """Reads the first GPU until the block ends.

    Attributes:
        library: ``pynvml``, of the distribution nvidia-ml-py.
        peak_bytes: Most of the GPU's memory that was used, by whatever process.
        watts: Mean power; None if the GPU does not tell.
    """

    library: ModuleType
    peak_bytes: int = 0
    watts: float | None = None
    _powers: list[float] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self.library.nvmlInit()
        self._thread = threading.Thread(target=self._read, args=(self.library.nvmlDeviceGetHandleByIndex(0),))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.library.nvmlShutdown()
        if self._powers:
            self.watts = sum(self._powers) / len(self._powers)

    def _read(self, device: Any) -> None:
        tells_power = True
        while True:
            self.peak_bytes = max(self.peak_bytes, self.library.nvmlDeviceGetMemoryInfo(device).used)
            if tells_power:
                try:
                    self._powers.append(self.library.nvmlDeviceGetPowerUsage(device) / 1000)
                except self.library.NVMLError:  # slices of a GPU do not
                    tells_power = False
            if self._ended.wait(INTERVAL):
                return

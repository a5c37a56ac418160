"""Time decoders in ONNX Runtime as they are served: one row, and past and present keys and values in one buffer.

Each model is loaded in a process of its own (this file as a command: FOLDER THREADS PROMPT STEPS), and their rounds alternate. With one thread,
processor time is measured, which a busy machine distorts least; with several, wall time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import alternating

HEAD_SIZE = 128
"""Size of the heads of all measured models, which not every graph declares."""


@dataclass(frozen=True)
class Speed:
    """One round: seconds of the prompt's call, and tokens per second of the calls of one token that follow."""

    prefill_seconds: float
    decode_tokens_per_second: float


def alternate(
    folders: Mapping[str, Path], *, threads: int, prompt: int, steps: int, rounds: int
) -> dict[str, list[Speed]]:
    """Run rounds of models in turn; the first round of each, which warms up, does not count."""
    words = [str(threads), str(prompt), str(steps)]
    commands = {name: [sys.executable, __file__, folder, *words] for name, folder in folders.items()}
    found = alternating.alternate(commands, rounds=rounds)
    if ended := folders.keys() - found.keys():
        raise SystemExit(f"the processes that run {', '.join(sorted(ended))} ended")
    return {name: [Speed(**figures) for figures in taken] for name, taken in found.items()}


def ratios(own: Sequence[Speed], peer: Sequence[Speed]) -> dict[str, float]:
    """Return the medians over rounds of how much faster the own model decodes, and how much longer its prompt takes."""
    pairs = list(zip(own, peer, strict=True))
    return {
        "decode_ratio": median(a.decode_tokens_per_second / b.decode_tokens_per_second for a, b in pairs),
        "prefill_ratio": median(a.prefill_seconds / b.prefill_seconds for a, b in pairs),
    }


def read_bandwidth(*, threads: int) -> float:
    """Return the bytes per second at which this machine's memory is read by so many threads: the limit of decoding."""
    import torch

    torch.set_num_threads(threads)
    values = torch.ones(256 << 20, dtype=torch.float32)
    times, clock = [], time.process_time if threads == 1 else time.perf_counter
    for _ in range(5):
        begin = clock()
        values.sum()
        times.append(clock() - begin)
    return 4 * len(values) / min(times)


class Decoder:
    """A folder's graph with buffers for some tokens."""

    def __init__(self, folder: Path, *, threads: int, tokens: int) -> None:
        import numpy as np
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        self._clock = time.process_time if threads == 1 else time.perf_counter
        self._session: Any = onnxruntime.InferenceSession(
            folder / "model.onnx", options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._binding = self._session.io_binding()
        self._buffers = []
        for name, value in self._inputs.items():
            if name.startswith("past_key_values."):
                size = value.shape[3] if isinstance(value.shape[3], int) else HEAD_SIZE
                empty = np.zeros((1, value.shape[1], tokens, size), np.float32)
                self._buffers.append(held := onnxruntime.OrtValue.ortvalue_from_numpy(empty))
                self._binding.bind_ortvalue_input(name, held)
                self._binding.bind_ortvalue_output(name.replace("past_key_values.", "present."), held)

    def run(self, tokens: list[int], *, past: int) -> None:
        """Compute logits of some tokens that follow a past; nobody reads them, as a sampler would read one row only."""
        import numpy as np

        total = past + len(tokens)
        feed = {
            "input_ids": np.array([tokens]),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(past, total)[None],
        }
        for name, array in feed.items():
            if name in self._inputs:
                self._binding.bind_cpu_input(name, array)
        self._binding.bind_output("logits")
        self._session.run_with_iobinding(self._binding)

    def round(self, prompt: int, steps: int) -> Speed:
        """Time a prompt and the tokens after it."""
        begin = self._clock()
        self.run([7 + index % 1000 for index in range(prompt)], past=0)
        middle = self._clock()
        for index in range(steps):
            self.run([7 + index % 1000], past=prompt + index)
        return Speed(middle - begin, steps / (self._clock() - middle))


def main() -> None:
    """Run rounds for as long as lines come."""
    folder, (threads, prompt, steps) = Path(sys.argv[1]), map(int, sys.argv[2:])

    def load() -> Callable[[], dict[str, float]]:
        decoder = Decoder(folder, threads=threads, tokens=prompt + steps)
        return lambda: asdict(decoder.round(prompt, steps))

    alternating.answer(load)


if __name__ == "__main__":
    main()

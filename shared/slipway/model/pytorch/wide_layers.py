"""Compute a PyTorch model in float32 while its large weights stay as they are stored: in 16 bits, mapped from their file.

Widening a 16-bit float is exact, so the results are those of a model that was converted as a whole. But only a piece of one weight exists
in float32 at a time, so memory does not grow with the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

SMALLEST_VALUES = 1 << 16
"""Smaller weights are converted once."""
PIECE_VALUES = 1 << 19
"""Values that are widened at a time: 2 MiB, which a core's own cache about holds. A decode step takes a third of what it takes with 16 MiB."""
_SHORT = (torch.bfloat16, torch.float16)


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply in float32 by oneDNN, which uses the vector units of all makers: on AMD, MKL takes twice the time."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    return product


_PRODUCT = _product if torch.backends.mkldnn.is_available() else nn.functional.linear


class _Scratch(threading.local):
    """Memory for the piece of a weight that a thread uses now; one for all layers, because one layer computes at a time."""

    def __init__(self) -> None:
        self._values = torch.empty(0)

    def widen(self, piece: torch.Tensor) -> torch.Tensor:
        """Return a piece of a weight in float32, until the next call."""
        if self._values.numel() < piece.numel():
            self._values = torch.empty(max(piece.numel(), PIECE_VALUES))
        return self._values[: piece.numel()].view(piece.shape).copy_(piece)


_SCRATCH = _Scratch()


class Crew:
    """Threads that compute pieces side by side, one core each.

    The threads of torch's own operators meet after every piece, and wait for each other longer than they compute; these meet once a layer.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="wide-layers") if threads > 1 else None
        if self._pool is not None:
            all_there = threading.Barrier(threads)
            for begun in [self._pool.submit(_begin, all_there) for _ in range(threads)]:
                begun.result()
            torch.set_num_threads(threads)  # a thread's own number is also the number that MKL uses elsewhere

    def run(self, compute: Callable[[int], None], starts: range) -> None:
        """Call a function with each start."""
        if self._pool is None or len(starts) < 2:
            for start in starts:
                compute(start)
            return
        shares = [starts[number :: self._threads] for number in range(self._threads)]
        for share in [self._pool.submit(_compute_all, compute, share) for share in shares]:
            share.result()

    def leave(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _begin(all_there: threading.Barrier) -> None:
    torch.get_num_threads()  # the first call in a thread sets the number of all
    torch.set_num_threads(1)
    all_there.wait()


@torch.inference_mode()  # results may be tensors of this mode, which nothing else may write to
def _compute_all(compute: Callable[[int], None], starts: range) -> None:
    for start in starts:
        compute(start)


class WideLinear(nn.Linear):
    """A linear layer whose weight is widened piece by piece; ``weight`` is all of it in float32, for code that asks for it."""

    stored: torch.Tensor
    crew: Crew

    @property
    def weight(self) -> Any:  # type: ignore[override] # a parameter of nn.Linear
        """Return the weight in float32. (out, in)."""
        return self.stored.float()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name of nn.Linear
        """Return the results of all rows. (…, in) -> (…, out)."""
        stored, flat = self.stored, input.reshape(-1, self.in_features)
        step = max(1, PIECE_VALUES // self.in_features)
        results = flat.new_empty(len(flat), self.out_features)

        def compute(start: int) -> None:
            part = slice(start, start + step)
            results[:, part] = _PRODUCT(flat, _SCRATCH.widen(stored[part]))

        self.crew.run(compute, range(0, self.out_features, step))
        if self.bias is not None:
            results += self.bias
        return results.view(*input.shape[:-1], self.out_features)


class WideEmbedding(nn.Embedding):
    """An embedding of which only the rows of a call are widened."""

    stored: torch.Tensor

    @property
    def weight(self) -> Any:  # type: ignore[override] # as above
        """Return the weight in float32. (rows, width)."""
        return self.stored.float()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name of nn.Embedding
        """Return the rows. (…) -> (…, width)."""
        return self.stored[input].float()


_WIDE: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: WideLinear, nn.Embedding: WideEmbedding}


def widen_while_computing(model: nn.Module) -> Callable[[], None]:
    """Let all large 16-bit weights of plain layers be widened where they are used; return a function that undoes this.

    Layers of other classes, and those whose computation something replaced, keep their parameters for the caller to convert.
    """
    crew = Crew(torch.get_num_threads())
    undo = widen_layers(model.modules(), crew)

    def restore() -> None:
        undo()
        crew.leave()

    return restore


def widen_layers(layers: Iterable[nn.Module], crew: Crew) -> Callable[[], None]:
    """As :func:`widen_while_computing`, for the plain ones of these layers, with threads that are there already."""
    undo = [_widen(layer, crew) for layer in layers if _is_plain(layer)]

    def restore() -> None:
        for each in undo:
            each()

    return restore


def _is_plain(layer: nn.Module) -> bool:
    kind = type(layer)
    if kind not in _WIDE or not (_has_own_function(layer) or _is_decompressed(layer)):
        return False
    if kind is nn.Embedding and getattr(layer, "max_norm", None) is not None:
        return False
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.dtype in _SHORT and weight.numel() >= SMALLEST_VALUES


def _has_own_function(layer: nn.Module) -> bool:
    """Return whether the layer computes what its class does; compressed-tensors may leave that function on the layer itself."""
    return "forward" not in layer.__dict__ or _function_of(layer) is type(layer).forward


def _is_decompressed(layer: nn.Module) -> bool:
    """Return whether compressed-tensors has decompressed the layer: its function calls that of the class, with the weight as it is.

    Around that it may round the inputs and results, if the level says so, and move the inputs to where the weight is.
    """
    inner = getattr(_function_of(layer), "__wrapped__", None)
    return inner is type(layer).forward and getattr(layer, "quantization_status", None) == "decompressed"


def _function_of(layer: nn.Module) -> Any:
    own = getattr(layer.__dict__.get("forward"), "__func__", None)
    return layer.__dict__.get("_original_forward_func", own)


def _rounds_activations(layer: nn.Module) -> bool:
    scheme = getattr(layer, "quantization_scheme", None)
    return bool(getattr(scheme, "input_activations", None) or getattr(scheme, "output_activations", None))


def _widen(layer: nn.Module, crew: Crew) -> Callable[[], None]:
    kind, computes = type(layer), layer.__dict__.get("forward")
    weight = layer._parameters["weight"]
    del layer._parameters["weight"]
    layer.__dict__.update(stored=weight, crew=crew)
    layer.__class__ = _WIDE[kind]
    if not _rounds_activations(layer):
        layer.__dict__.pop("forward", None)

    def restore() -> None:
        layer.__class__ = kind
        del layer.__dict__["stored"], layer.__dict__["crew"]
        layer._parameters["weight"] = weight
        if computes is not None:
            layer.__dict__["forward"] = computes

    return restore

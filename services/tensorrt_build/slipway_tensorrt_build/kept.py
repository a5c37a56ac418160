"""What the stage keeps on a machine for later builds: measured times of kernels, and engines to refit.

Refitting: a merge of another adapter of the same base gives the same graph with other weights. TensorRT names an engine's weights as the
graph's initializers are named, so a kept engine takes them by name and none is built. Refitting, and building an engine for it, need the
GPU; only the comparison of graphs runs without.

Times: with those that TensorRT measured for its kernels on a GPU, the next engine for this GPU takes less time to build. Only TensorRT
measures: TensorRT-RTX builds without a GPU, and its functions for timing caches do nothing (version 1.7).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.errors import TensorRTBuildError
from slipway.files.regular_file import read_regular, sha256_of
from slipway.machine.processors import Gpu
from slipway.stage import Context
from slipway_tensorrt_build.builders import Choice

_MOST_ENGINES = 4
"""Most engines that are kept on a machine; the oldest are deleted first."""
_ENGINE_ENDING = ".refittable"

_LARGEST_TIMINGS = 256 << 20
"""Most bytes of a file; caches of large models have some megabytes."""
_TIMINGS_ENDING = ".timings"


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A graph without its weights.

    Attributes:
        digest: SHA-256 of everything but the values of weights and the metadata, which names the merge.
        weights: Type (of ONNX) and number of values of each weight by the initializer's name.
    """

    digest: str
    weights: Mapping[str, tuple[str, int]]


def skeleton_of(graph: Path) -> Skeleton:
    """Return a graph's skeleton. Weights are float initializers of more than one value; smaller ones and integers are part of the graph.

    Raises:
        TensorRTBuildError: ``ONNX_INVALID``: the graph cannot be read, or integers lie in its data file.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(graph, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise _invalid_error(f"{graph.name} cannot be read ({error})") from error
    types = onnx.TensorProto
    floats: dict[int, str] = {types.FLOAT: "FLOAT", types.FLOAT16: "HALF", types.BFLOAT16: "BF16"}
    weights: dict[str, tuple[str, int]] = {}
    for tensor in model.graph.initializer:
        size = 1
        for length in tensor.dims:
            size *= length
        if tensor.data_type in floats and size > 1:
            weights[tensor.name] = (floats[tensor.data_type], size)
            bare = types(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            tensor.CopyFrom(bare)
        elif tensor.data_location == types.EXTERNAL:
            raise _invalid_error(f"{graph.name} has {tensor.name!r}, which is no float, in its data file")
    del model.metadata_props[:]
    stored = model.SerializeToString(deterministic=True)
    return Skeleton(hashlib.sha256(stored).hexdigest(), dict(sorted(weights.items())))


def mark_refittable(network: Any, skeleton: Skeleton) -> None:
    """Mark the weights of a network as those that may be replaced.

    Raises:
        TensorRTBuildError: The network has no weights of such a name.
    """
    for name in skeleton.weights:
        if not network.mark_weights_refittable(name):
            raise TensorRTBuildError(
                f"TensorRT does not know the weight {name!r} of the graph, so the engine could not be refitted",
                remedy="set refit to false",
                about={"weight": name},
            )


class Refittable:
    """The engines of one graph for one GPU, builder and profile that can be refitted.

    Args:
        skeleton: The graph.
        of: Everything else that an engine depends on, as values of JSON.
        graph: The file with the new weights.
        ctx: Context of the stage; without :attr:`~slipway.stage.Context.kept`, no engine is kept.
    """

    def __init__(self, skeleton: Skeleton, of: Mapping[str, Any], *, graph: Path, ctx: Context) -> None:
        self._skeleton, self._graph, self._ctx = skeleton, graph, ctx
        document = json.dumps({"graph": skeleton.digest, **of}, sort_keys=True)
        self._key = hashlib.sha256(document.encode()).hexdigest()

    def refit(self, trt: Any, logger: Any, errors: list[str]) -> bytes | None:
        """Return a kept engine with the new weights; None if there is none, or if TensorRT does not take them, which is logged."""
        for path in self._find_engines(self._key):
            if path.is_symlink() or sha256_of(path) != path.name.split(".")[1]:
                self._ctx.log.info(f"{path.name} is damaged and is not refitted")
                continue
            errors.clear()
            made, why = self._refit(trt, logger, path.read_bytes())
            if made is not None:
                return made
            self._ctx.log.info(
                f"the engine is built, because {path.name} cannot be refitted: {'; '.join([why, *errors])}"
            )
        return None

    def keep(self, engine: Path, sha256: str) -> None:
        """Keep a new engine for later merges."""
        if self._ctx.kept is None:
            return
        try:
            replaced = self._find_engines(self._key)
            others = [path for path in self._find_engines("*") if path not in replaced]
            for path in [*replaced, *others[_MOST_ENGINES - 1 :]]:
                path.unlink(missing_ok=True)
            os.link(engine, self._ctx.kept / f"{self._key}.{sha256}{_ENGINE_ENDING}")
        except OSError as error:
            self._ctx.log.info(f"the engine is not kept for other merges: {error}")

    def _find_engines(self, key: str) -> list[Path]:
        """Return the kept engines, the newest first."""
        if self._ctx.kept is None:
            return []
        paths = self._ctx.kept.glob(f"{key}.*{_ENGINE_ENDING}")
        return sorted(paths, key=lambda path: (-path.lstat().st_mtime, path.name))

    def _refit(self, trt: Any, logger: Any, plan: bytes) -> tuple[bytes | None, str]:
        engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
        if engine is None:
            return None, "it does not load"
        refitter = trt.Refitter(engine, logger)
        if why := weights_difference(self._skeleton, refitter):
            return None, why
        parser = trt.OnnxParserRefitter(refitter, logger)
        if not parser.refit_from_file(str(self._graph)):
            return None, "; ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        if missing := sorted(refitter.get_missing_weights()):
            return None, f"{missing[0]!r} got no values"
        if not refitter.refit_cuda_engine():
            return None, "TensorRT refuses the weights"
        return bytes(engine.serialize()), ""


def weights_difference(skeleton: Skeleton, refitter: Any) -> str:
    """Describe how the weights of an engine differ from those of a graph; empty if names, types and sizes are the same."""
    names = set(refitter.get_all_weights())
    if lost := sorted(skeleton.weights.keys() - names):
        return f"it has no weight {lost[0]!r}"
    if more := sorted(names - skeleton.weights.keys()):
        return f"the graph has no weight {more[0]!r}"
    for name, (dtype, size) in skeleton.weights.items():
        known = refitter.get_weights_prototype(name)
        if (known.dtype.name, known.size) != (dtype, size):
            return (
                f"its weight {name!r} has {known.size} values of {known.dtype.name}, and the graph's {size} of {dtype}"
            )
    return ""


def _invalid_error(message: str) -> TensorRTBuildError:
    return TensorRTBuildError(
        message,
        reason="ONNX_INVALID",
        remedy="give the folder that onnx_export wrote, or set refit to false",
    )


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
                re.sub(r"[^A-Za-z0-9.]+", "_", f"{gpu.name}-{gpu.architecture}-{choice.version}") + _TIMINGS_ENDING
            )

    def give(self, config: Any) -> None:
        """Give a builder the known times. TensorRT measures again if it refuses them, such as those of another driver."""
        if self._file is None:
            return
        data = b""
        with contextlib.suppress(OSError):
            data = b"" if self._file.is_symlink() else read_regular(self._file, largest=_LARGEST_TIMINGS)
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

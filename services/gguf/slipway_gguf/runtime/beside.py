"""An adapter's GGUF file in llama.cpp, beside a file of its base that is written for this alone."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from slipway.errors import ModelExportError
from slipway.stage import Context
from slipway_gguf.export import export_model
from slipway_gguf.params import GGUFParams
from slipway_gguf.runtime.llama import Llama
from slipway_gguf.runtime.model import GGUFModel, only_file
from slipway_validate.folders import stored_dtype
from slipway_validate.runner.model import Unusable


def load(folder: Path, base: Path, *, threads: int) -> GGUFModel:
    """Load an adapter beside its base in float16, the type of the format's unquantized file.

    The base's file is gone once llama.cpp has mapped it, so that its space is free when this process ends. Writing it is no part of loading.

    Raises:
        NotRunnable: llama.cpp is missing here, or of another version.
        Unusable: The base cannot be written, or llama.cpp cannot load the two.
    """
    llama, started = Llama(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="base-", dir=Path.cwd()) as work:
        try:
            written = export_model({"pytorch": base}, GGUFParams(), Context(workdir=Path(work), threads=threads))
        except ModelExportError as error:
            raise Unusable(f"the base cannot be written as GGUF: {error}") from error
        prepared = time.perf_counter() - started
        files = only_file(written), only_file(folder)
        model = GGUFModel(llama, files[0], threads=threads, stored=stored_dtype(folder), adapter=files[1])
    model.preparation_seconds = prepared
    return model

"""Run an adapter's GGUF file in llama.cpp, beside a file of its base that is written only for this."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from slipway.errors import ModelExportError
from slipway.proof.runtime import Unusable
from slipway.stage import Context
from slipway_gguf.export import export_model
from slipway_gguf.lora.export import PATTERN, missing_weights
from slipway_gguf.params import GGUFParams
from slipway_gguf.runtime.llama import Llama
from slipway_gguf.runtime.model import Beside, GGUFModel, only_file
from slipway_gguf.vocabulary.documents import DEFAULT, read_files, templates_of

STORED = "float16"
"""Type of the base's weights when an adapter is run: that of the format's unquantized file."""


def load(folder: Path, base: Path, *, threads: int) -> GGUFModel:
    """Load an adapter beside its base in float16, the type of the format's unquantized file.

    The base's file is removed after results have been compared, or with the process's temporary files. The time to write it does not
    count as loading.

    Raises:
        NotRunnable: llama.cpp is missing here, or of another version.
        Unusable: The base cannot be written, the adapter's file lacks factors, or llama.cpp cannot load the two.
    """
    llama, started = Llama(), time.perf_counter()
    file = only_file(folder, PATTERN)
    try:
        lost = missing_weights(folder, file)
    except (OSError, ValueError, LookupError) as error:
        raise Unusable(f"{file.name} and its description cannot be read: {error}") from error
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise Unusable(
            f"{file.name} has lost the factors of {lost[0]}{more}, without which llama.cpp would run it in silence"
        )
    work = tempfile.TemporaryDirectory(prefix="base-")
    try:
        context = Context(workdir=Path(work.name), threads=threads)
        written = only_file(export_model({"pytorch": base}, GGUFParams(), context))
        template = templates_of(read_files(folder)).get(DEFAULT, "")
        prepared = time.perf_counter() - started
        beside = Beside(file, template=template, release=work.cleanup)
        model = GGUFModel(llama, written, threads=threads, stored=STORED, beside=beside)
    except ModelExportError as error:
        work.cleanup()
        raise Unusable(f"the base cannot be written as GGUF: {error}") from error
    except Unusable:
        work.cleanup()
        raise
    model.preparation_seconds = prepared
    return model

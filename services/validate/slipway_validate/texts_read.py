"""Have transformers read hard texts and conversations, once for all outputs whose runtime reads text itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipway.stage import Context
from slipway_validate.folders import runtime_for
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import Spec, TextSpec


@dataclass(frozen=True, slots=True)
class Texts:
    """What transformers reads.

    Attributes:
        file: File of :class:`slipway_validate.runner.texts.ReadTexts`; None if no output needs it, or it could not be made.
        missing: Why it could not be made.
    """

    file: Path | None = None
    missing: str = ""


def read_texts(
    outputs: Mapping[str, Path],
    tokenizer: Path,
    base: Path,
    ctx: Context,
    *,
    folder: Path,
    timeout_seconds: float,
) -> Texts:
    """Read the texts if the runtime of any output reads text itself.

    Raises:
        StageError: ``CANCELLED``.
    """
    runtimes = [runtime_for(name, folder) for name, folder in outputs.items()]
    if not any(runtime is not None and runtime.reads_text for runtime in runtimes):
        return Texts()
    file = folder.with_suffix(".json")
    spec = Spec(texts=TextSpec(tokenizer=tokenizer.absolute(), base=base.absolute(), file=file.absolute()))
    result = process.run(spec, folder, ctx, label="texts", timeout_seconds=timeout_seconds)
    return Texts(file) if result.status == "done" else Texts(missing=result.message)

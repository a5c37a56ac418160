"""Make the sample: train, save like a training run, and describe the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from slipway.configuration.calibration import SAMPLE_OF_RUN
from slipway.formats.registry import formats
from slipway.sample.corpus import documentation, python_sources
from slipway.sample.publishing import CONFIGURATION, HELDOUT, SampleSummary, make_once, write_text
from slipway.sample.recipe import Recipe
from slipway.sample.training import BASE, RUN, Measured, train
from slipway.stage import Progress

# Paths are relative to the file's own folder.
_EXPORT_YAML = """\
# The whole chain on the sample: slipway export -c export.yaml
export:
  checkpoint: {path: "qwen3-finetuned", auto_detect_latest: true}
  base_model: {name: "qwen3-base"}
  optimization: {quantization: "none"}
  formats:
    FORMATS
  validation: {enabled: true, test_samples: 10, compare_outputs: true, benchmark_performance: true, heldout: "heldout"}
  output: {directory: "exported", naming_pattern: "{model_name}_{timestamp}"}
"""


def export_yaml() -> str:
    """Return the sample's configuration, with what every installed format has in it."""
    lines = [f"{name}: {each.rules.sample}" for name, each in formats().items() if each.rules.sample]
    return _EXPORT_YAML.replace("FORMATS", "\n    ".join(lines))


def make_sample(
    directory: Path,
    *,
    seed: int = 0,
    threads: int | None = None,
    recipe: Recipe | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> SampleSummary:
    """Train a small Qwen3 base model and a LoRA on another text, and save both like a Hugging Face run.

    ``directory`` receives ``qwen3-base/``, ``qwen3-finetuned/checkpoint-N/``, ``qwen3-finetuned/calibration.jsonl`` (the adapter's
    training text), ``heldout/heldout.txt`` (text of the adapter's domain that was never trained on), ``export.yaml`` and, last, ``sample.json``. An existing sample of the same
    recipe, seed and libraries is kept.

    Args:
        directory: Target folder; created if missing. Other files in it are left alone.
        seed: The same seed and threads on the same machine give the same weights.
        threads: Training threads; by default two, or one on a single core.
        recipe: Sizes and steps.
        on_progress: Called after every training step.

    Raises:
        ModelExportError: reason ``OUTPUT_EXISTS`` if ``directory`` has other files of these names; ``FILE_ERROR`` if this Python
            lacks the texts or ``directory`` cannot be written.
    """
    chosen = recipe or Recipe()

    def make(scratch: Path) -> Measured:
        english, python = documentation(), python_sources()
        measured = train(
            scratch, english, python=python, recipe=chosen, seed=seed, threads=threads, on_progress=on_progress
        )
        write_text(scratch / HELDOUT / "heldout.txt", "\n".join(python.heldout))
        write_text(scratch / RUN / SAMPLE_OF_RUN, _lines(python.training))
        write_text(scratch / CONFIGURATION, export_yaml())
        return measured

    pieces = (BASE, RUN, HELDOUT, CONFIGURATION)
    return make_once(directory, make, pieces=pieces, seed=seed, recipe=asdict(chosen))


def _lines(texts: Iterable[str]) -> str:
    """Return texts as JSON lines, as a calibration reads them."""
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)

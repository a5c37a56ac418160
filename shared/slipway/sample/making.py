"""Make the sample: train, save like a training run, describe the result, and publish it whole or not at all.

A sample is put together beside its folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from slipway.configuration.calibration import SAMPLE_OF_RUN
from slipway.distribution import installed_version
from slipway.errors import ModelExportError
from slipway.files.json_documents import LARGEST
from slipway.files.regular_file import read_regular
from slipway.files.work_folders import unfinished
from slipway.formats.registry import formats
from slipway.machine.shortages import is_disk_full
from slipway.sample.corpus import documentation, python_sources
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

HELDOUT = "heldout"
CONFIGURATION = "export.yaml"
SUMMARY = "sample.json"

_LIBRARIES = ("torch", "transformers", "peft", "tokenizers")

RecipeSettings = Mapping[str, int | float | str]


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


class SampleSummary(BaseModel):
    """Description of a sample, also written as ``sample.json``, last of all.

    Attributes:
        seed: Seed of all weights and orders.
        recipe: Sizes, steps and learning rates.
        libraries: Versions of the libraries that trained it.
        measured: Size and perplexities.
    """

    model_config = ConfigDict(frozen=True)

    seed: int
    recipe: dict[str, bool | int | float | str]
    libraries: dict[str, str]
    measured: Measured


def make_once(
    directory: Path, make: Callable[[Path], Measured], *, pieces: Sequence[str], seed: int, recipe: RecipeSettings
) -> SampleSummary:
    """Make a sample in ``directory``; one of the same seed, recipe and libraries is kept.

    Args:
        directory: Target folder; created if missing.
        make: Makes all pieces in the folder that it is given.
        pieces: Files and folders of the sample.
        seed: Its seed.
        recipe: All else that decides its content.

    Raises:
        ModelExportError: ``OUTPUT_EXISTS`` if ``directory`` has other files of these names; ``FILE_ERROR`` or ``DISK_FULL`` if it
            cannot be written.
    """
    kept = _find_existing(directory, pieces=pieces, seed=seed, recipe=recipe)
    if kept is not None:
        return kept
    _refuse_to_overwrite(directory, pieces)
    try:
        with unfinished(directory / "sample") as scratch:
            measured = make(scratch)
            summary = SampleSummary(seed=seed, recipe=dict(recipe), libraries=_library_versions(), measured=measured)
            for piece in pieces:
                (scratch / piece).rename(directory / piece)
            write_text(scratch / SUMMARY, summary.model_dump_json(indent=2, exclude_none=True) + "\n")
            (scratch / SUMMARY).replace(directory / SUMMARY)
    except OSError as error:
        full = is_disk_full(error)
        raise ModelExportError(
            f"cannot write the sample into {directory}: {error.strerror or error}",
            reason="DISK_FULL" if full else "FILE_ERROR",
            remedy="free space there, or choose another folder" if full else "choose a folder that can be written",
            about={"file": directory},
        ) from error
    return summary


def write_text(path: Path, text: str) -> None:
    """Write a text of the sample; its folder is made if it is missing."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _find_existing(
    directory: Path, *, pieces: Sequence[str], seed: int, recipe: RecipeSettings
) -> SampleSummary | None:
    """Return the existing sample if it is complete and equal to the one that would be made."""
    try:
        summary = SampleSummary.model_validate_json(read_regular(directory / SUMMARY, largest=LARGEST))
    except (OSError, ValidationError):
        return None
    same = summary.seed == seed and summary.recipe == recipe and summary.libraries == _library_versions()
    complete = all((directory / piece).exists() for piece in pieces)
    return summary if same and complete else None


def _refuse_to_overwrite(directory: Path, pieces: Sequence[str]) -> None:
    # A finished sample of another kind has other pieces, and one folder holds one sample.
    present = [piece for piece in (*pieces, SUMMARY) if (directory / piece).exists()]
    if present:
        raise ModelExportError(
            f"{directory} already holds {', '.join(present)}, made with another seed, recipe or library version",
            reason="OUTPUT_EXISTS",
            remedy="choose another folder or remove these first",
            about={"file": directory / present[0]},
        )


def _library_versions() -> dict[str, str]:
    return {name: installed_version(name) for name in _LIBRARIES}

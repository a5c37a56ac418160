"""What to make for a target, of which everything is known that was looked at: the answer of ``slipway recommend``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipway.advice.candidates import Candidate, Subject, recommend, settings_for
from slipway.advice.measured import Measured, read_measured
from slipway.errors import ConfigurationError
from slipway.formats.targets import target_name
from slipway.representation import html_table, named_few, preformatted, three_lines
from slipway.sizes import format_size


def format_estimate(size: int | None) -> str:
    """Format a size that is an upper bound; a dash if it is unknown."""
    return "–" if size is None else f"≤ {format_size(size)}"


@dataclass(frozen=True, repr=False)
class Recommendation:
    """The outputs that run on a target, the best first, as ``slipway recommend`` shows them.

    Attributes:
        target: Where the model shall run.
        family: Family of the model; empty if none was named.
        candidates: What runs there, the best first; what does not fit comes last, with ``unfit`` saying why.
        measured: Figures of earlier exports, by the names of outputs.
        yaml: The configuration that makes the best one.
    """

    target: str
    family: str
    candidates: tuple[Candidate, ...]
    measured: Mapping[str, Measured]
    yaml: str

    @property
    def best(self) -> Candidate:
        """The output to make."""
        return self.candidates[0]

    def to_json(self) -> dict[str, Any]:
        """Return what ``slipway recommend --json`` prints."""
        entries = [
            {
                "output": one.output,
                **asdict(one),
                "measured": asdict(self.measured[one.output]) if one.output in self.measured else None,
            }
            for one in self.candidates
        ]
        return {"target": self.target, "family": self.family, "candidates": entries, "yaml": self.yaml}

    def __repr__(self) -> str:
        size = "" if self.best.size_bytes is None else f", at most {format_size(self.best.size_bytes)}"
        others = [one.output for one in self.candidates[1:] if not one.unfit]
        return three_lines(
            f"Recommendation: {self.best.output} for {self.target}{size}",
            self.best.why,
            f"others that fit: {named_few(others) or 'none'}",
        )

    def _repr_html_(self) -> str:
        rows = (
            (one.output, format_estimate(one.size_bytes), format_estimate(one.memory_bytes), one.unfit or one.why)
            for one in self.candidates
        )
        return html_table(("output", "size", "memory", "why"), rows) + preformatted(self.yaml)


def recommend_outputs(
    target: str, *, model: str = "", memory: int | None = None, report: Path | None = None
) -> Recommendation:
    """Return the outputs that run on a target, the best first, with the configuration that makes it.

    Args:
        target: One of :data:`slipway.formats.targets.TARGETS`, or another name of one, in any case.
        model: Folder of the model, or its id in the local cache, for sizes; empty for none.
        memory: Bytes of memory on the target.
        report: An earlier export or its ``report.json``, for measured figures.

    Raises:
        ConfigurationError: ``TARGET_UNKNOWN``; ``TARGET_UNFIT``: nothing installed fits; ``PARAMS_INVALID``: a memory without a model.
        CheckpointValidationError: There is no such model.
        ArtifactError: ``FILE_ERROR``: there is no such report.
    """
    if memory is not None and not model:
        raise ConfigurationError(
            "--memory is compared with the size of a model, and none is given",
            reason="PARAMS_INVALID",
            remedy="add --model DIR",
        )
    subject = Subject.read(model) if model else None
    target = target_name(target)
    candidates = recommend(target, subject=subject, memory=memory)
    measured = read_measured(report) if report else {}
    family = subject.family if subject else ""
    return Recommendation(target, family, candidates, measured, settings_for(candidates[0], target, model=model))

"""Find tensors of the base's other parts (multi-token heads, parts for images and sound) that an output lacks.

transformers loads a folder without them, with random values or not at all, and results on text stay the same: only names tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from slipway.errors import CheckpointValidationError
from slipway.model.folder import ModelFolder
from slipway.validation.comparisons import Check
from slipway.validation.parts import MissingPart

MISSING = "missing_tensors"
REMEDY = "merge again, and make this format from the merged model; report.json has the parts"
_EXPERTS = ".experts."
_ENDS = (
    *("_packed", "_scale", "_global_scale", "_zero_point", "_shape", "_g_idx"),
    *("_scale_inv", "_blocks", "_scales"),
)
"""What stored names of a rounded weight have behind the name of the weight."""


def find_missing(base: ModelFolder, output: Path) -> tuple[MissingPart, ...]:
    """Return the parts of the base of which an output's files lack tensors, from the headers alone; empty if the two cannot be compared.

    Nothing is compared with a base that is rounded itself, or with an output of another class or number of layers: their names may differ.

    Args:
        base: The base.
        output: Folder of an output in transformers' form.
    """
    try:
        made = ModelFolder.open(output)
        if not _are_alike(base.config, made.config) or base.config.quantization:
            return ()
        wanted, held = base.parts, made.parts
    except (CheckpointValidationError, OSError):
        return ()
    names = frozenset(name for tensors in held.values() for each in tensors for name in _forms(each.place))
    left = {part: [each for each in tensors if not _is_held(each.place, names)] for part, tensors in wanted.items()}
    return tuple(
        MissingPart(part=part.value, missing=len(lacking), tensors=len(wanted[part]), first=lacking[0].name)
        for part, lacking in left.items()
        if lacking
    )


def _are_alike(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    return before.get("architectures") == after.get("architectures") and _layers(before) == _layers(after)


def _layers(config: Mapping[str, object]) -> object:
    text = config.get("text_config")
    return (text if isinstance(text, dict) else config).get("num_hidden_layers")


def _forms(place: str) -> tuple[str, ...]:
    """Return the names by which a stored tensor counts as there: its own, that of the weight it rounds, and that of its layer's experts."""
    plain = next((place.removesuffix(end) for end in _ENDS if place.endswith(end)), place)
    experts = plain[: plain.index(_EXPERTS) + len(_EXPERTS)] if _EXPERTS in plain else plain
    return place, plain, experts


def _is_held(place: str, names: frozenset[str]) -> bool:
    """Return whether a tensor is there; experts may be stored one by one in one folder, and in stacks in another."""
    return place in names or (_EXPERTS in place and place[: place.index(_EXPERTS) + len(_EXPERTS)] in names)


def checks(missing: Sequence[MissingPart]) -> list[Check]:
    """Return the check that fails if tensors are missing; none if all are there, as for nearly all models."""
    count = float(sum(each.missing for each in missing))
    if not count:
        return []
    return [Check(name=MISSING, value=count, limit=0.0, comparison="<=", passed=False, against="itself", unit="count")]


def explain(missing: Sequence[MissingPart]) -> tuple[str, str]:
    """Return what is missing and what to do."""
    return "; ".join(each.said for each in missing), REMEDY

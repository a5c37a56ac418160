"""Judge a base model by files, before anything runs: it is the adapter's, it is another one, or files cannot tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipway.base_match.checkpoint import misfit, other_library, other_tokenizer
from slipway.base_match.match import BaseMatch, BaseMatchStatus
from slipway.base_match.models import Comparison, compare_models
from slipway.base_match.recorded import Recorded, last_part, recorded_base, repository_of
from slipway.base_match.weights import Outcome
from slipway.errors import CheckpointValidationError
from slipway.model.runs.checkpoints import read_adapter_config

MISFIT, MISMATCH = "ADAPTER_BASE_MISMATCH", "BASE_MODEL_MISMATCH"
_REMEDY = (
    "set base_model.name (--base-model, EXPORT_BASE_MODEL) to the model the adapter was trained on; if you know that this base "
    "is the right one, set base_model.trust: true"
)
_WORST = (BaseMatchStatus.CONFIRMED, BaseMatchStatus.UNPROVEN, BaseMatchStatus.TRUSTED)


@dataclass(frozen=True, slots=True)
class UsedBase:
    """The base model of an export.

    Attributes:
        folder: Its folder.
        label: Its name for people, never a path of this machine.
        contents: Whether its files can be read; for a bucket, the folder has only headers and configurations.
        repository: Hub repository that it was just read from; empty for any other base.
        revisions: Names of the revision that was read: the commit, and the requested one.
        look: Whether to search this machine for the model that the adapter names.
    """

    folder: Path
    label: str
    contents: bool
    repository: str = ""
    revisions: tuple[str, ...] = ()
    look: bool = True


def match_base(base: UsedBase, checkpoints: Sequence[Path], *, trust: bool) -> BaseMatch:
    """Compare the base in use with the one the adapters were trained on; for several adapters, return the least certain verdict.

    Args:
        base: The base in use.
        checkpoints: Folders with the adapters.
        trust: Accept a base that files contradict.

    Raises:
        CheckpointValidationError: ``ADAPTER_BASE_MISMATCH`` if an adapter's shapes do not fit; ``BASE_MODEL_MISMATCH`` if the
            base is another model than an adapter names.
    """
    found = [_match(base, checkpoint, trust=trust) for checkpoint in checkpoints]
    return max(found, key=lambda match: _WORST.index(match.status))


def _match(base: UsedBase, checkpoint: Path, *, trust: bool) -> BaseMatch:
    config = read_adapter_config(checkpoint)
    recorded = recorded_base(checkpoint, config, look=base.look)
    reason, what = MISFIT, misfit(checkpoint, config, base.folder)
    compared = None if what else _from_hub(base, recorded) or _compared(base, recorded)
    if compared is not None and compared.outcome is Outcome.SAME:
        return BaseMatch(status=BaseMatchStatus.CONFIRMED, reason=compared.what)
    if not what:
        reason = MISMATCH
        what = compared.what if compared is not None and compared.outcome is Outcome.OTHER else ""
        what = what or other_library(config, base.folder)
        what = what or (other_tokenizer(checkpoint, base.folder) if base.contents else "")
    if not what:
        return BaseMatch(status=BaseMatchStatus.UNPROVEN, reason=_unproven(base, recorded, compared))
    if not trust:
        raise _refusal(base, checkpoint, recorded, reason=reason, what=what)
    return BaseMatch(
        status=BaseMatchStatus.TRUSTED, reason=f"files speak against the base, and base_model.trust takes it: {what}"
    )


def _compared(base: UsedBase, recorded: Recorded) -> Comparison | None:
    """Compare the base in use with the recorded one; return None if that is not on this machine, or is the same folder.

    The same folder proves nothing: it can hold another model by now. A snapshot of a repository cannot change.
    """
    if recorded.folder is None:
        return None
    repository = repository_of(recorded.folder)
    if _same_place(base.folder, recorded.folder):
        said = f"it is {repository} from the Hugging Face cache, which the adapter names"
        return Comparison(Outcome.SAME, said) if repository else None
    found = compare_models(base.folder, recorded.folder, contents=base.contents)
    if found.outcome is Outcome.SAME:
        return Comparison(Outcome.SAME, f"it is {recorded.label}, which the adapter names: {found.what}")
    if found.outcome is Outcome.OTHER and recorded.guessed:
        return Comparison(Outcome.UNKNOWN, "a folder of that name in the current folder holds another model")
    revisions = repository != "" and repository_of(base.folder) == repository
    if found.outcome is Outcome.OTHER and revisions and not recorded.revision:
        said = "they are two revisions of one repository, and the adapter does not say which it needs"
        return Comparison(Outcome.UNKNOWN, said)
    return found


def _from_hub(base: UsedBase, recorded: Recorded) -> Comparison | None:
    """Return SAME if the base was just read from the repository and revision that the adapter names."""
    if not base.repository or base.repository != recorded.name or (recorded.revision or "main") not in base.revisions:
        return None
    return Comparison(Outcome.SAME, f"it is {base.repository} from the hub, which the adapter names")


def _same_place(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _unproven(base: UsedBase, recorded: Recorded, compared: Comparison | None) -> str:
    """Return why files cannot tell."""
    if not recorded.name:
        return "the adapter does not name its base model"
    if compared is not None:
        return f"the base could not be compared with {recorded.label}, which the adapter names: {compared.what}"
    if recorded.folder is not None:
        return f"the base is in the folder that the adapter names ({recorded.label}), and only that name speaks for it"
    absent = "which is not on this machine to compare with"
    if last_part(recorded.name) == last_part(base.label):
        return f"only its name speaks for the base: the adapter names {recorded.label}, {absent}"
    return f"the adapter names {recorded.label}, {absent}, and the base in use is {base.label!r}"


def _refusal(
    base: UsedBase, checkpoint: Path, recorded: Recorded, *, reason: str, what: str
) -> CheckpointValidationError:
    named = f"{recorded.name[:1000]!r}" if recorded.name else "no base model"
    where = f", found at {recorded.folder}" if recorded.folder is not None else ""
    return CheckpointValidationError(
        f"the base model {base.folder} is not the one the adapter was trained on: {what}; "
        f"adapter_config.json in {checkpoint} names {named}{where}",
        reason=reason,
        remedy=_REMEDY,
        about={"base_model": base.folder, "checkpoint": checkpoint, "recorded": recorded.name[:1000]},
    )

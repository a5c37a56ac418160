"""Judge an output of a model that takes images or sound by its results behind pictures or sound, as by those on text."""

from __future__ import annotations

from collections.abc import Sequence

from slipway.model.configuration import ModelConfig
from slipway.model.families import Comparison
from slipway.texts import printable
from slipway.validation.comparisons import Check
from slipway.validation.pictures import PictureComparison, PictureEffect, Sense
from slipway.validation.verdicts import Answer, Verdict
from slipway_validate.judging.distances import choose_measure
from slipway_validate.protocol.pictures import Looked

PREFIXES = tuple(f"{each}." for each in Sense)
"""Beginnings of the names of checks of results behind pictures and sound."""
UNREADABLE = tuple(f"{each}unreadable" for each in PREFIXES)
"""Names of the checks that fail if an output cannot compute pictures or sound."""
_CAUSE = (
    "{place} it gives other results than its weights should: a weight of its part for {parts} (encoder, projector) is another one or "
    "lies in another place, or its runtime computes {sense} otherwise"
)
CAUSES = {
    each.value: _CAUSE.format(place=each.place, parts="images" if each is Sense.PICTURES else "sound", sense=each.value)
    for each in Sense
}
"""What failed checks of results behind pictures or sound mean, by the beginning of their names."""
REMEDY = "make this format from the merged model again, and merge again if its PyTorch output fails too; report.json has the checks"
EARLIER = "the reference has no pictures: an earlier version made it, or max_logit_bytes leaves no room for them"
_ON_TEXT_ALONE = (
    "the model takes images or sound too, and its outputs were compared on text alone{why}: of the parts for images and sound, only the stored "
    "weights that the adapter changes were"
)
_NOT_ON_OTHER = (
    "the model takes {other} too, and its outputs were compared on text and {sense}: of the part for {other}, only the stored weights that the "
    "adapter changes were"
)
_WORST_FIRST = (Answer.FAILED, Answer.WARNING, Answer.PASSED, Answer.NOT_JUDGED)


def describe_effect(looked: Looked | None, effect: float | None, *, expected: bool) -> PictureEffect | None:
    """Describe what the reference computes of prompts with a picture; None for a model that takes none.

    Args:
        looked: What its runner wrote; None if it was not asked for pictures.
        effect: Distance of the base behind pictures.
        expected: Whether the model takes pictures.
    """
    if looked is None:
        return PictureEffect(not_run=EARLIER) if expected else None
    why = looked.not_run or looked.failed
    return PictureEffect(
        sense=looked.sense,
        pictures=looked.pictures,
        tokens=looked.pictures * looked.tokens,
        effect_kl=effect,
        not_run=why,
    )


def list_warnings(config: ModelConfig, reference: PictureEffect | None) -> list[str]:
    """Return warnings of inputs beside text on which nothing was compared, and of an adapter that changes almost nothing behind pictures."""
    if reference is None or reference.not_run:
        return [_ON_TEXT_ALONE.format(why="" if reference is None else f" ({printable(reference.not_run)})")]
    setting, other = ("audio_config", "sound") if reference.sense is Sense.PICTURES else ("vision_config", "images")
    warnings = [] if config.get(setting) is None else [_NOT_ON_OTHER.format(other=other, sense=reference.sense.value)]
    weak = choose_measure(Comparison.NEXT_TOKEN, width=0).weak_effect
    if reference.effect_kl is not None and reference.effect_kl < weak:
        warnings.append(
            f"the adapter has almost no effect {reference.sense.place} (mean KL to the base {reference.effect_kl:.2g} nats/token): what is kept of it "
            "there is judged by distance"
        )
    return warnings


def begin_comparison(reference: PictureEffect, looked: Looked | None) -> PictureComparison:
    """Return what is known of an output before its results are compared."""
    if reference.not_run:
        return PictureComparison(sense=reference.sense, not_run=reference.not_run)
    if looked is None:
        return PictureComparison(sense=reference.sense, not_run="its process did not come to them")
    return PictureComparison(
        sense=reference.sense,
        pictures=looked.pictures,
        tokens=looked.pictures * looked.tokens,
        not_run=looked.not_run,
        failed=looked.failed,
    )


def name_checks(checks: Sequence[Check], sense: Sense) -> tuple[Check, ...]:
    """Return checks of results behind pictures or sound, named as such."""
    return tuple(each.model_copy(update={"name": f"{sense}.{each.name}"}) for each in checks)


def check_unreadable(comparison: PictureComparison) -> tuple[Check, ...]:
    """Return the check that fails if an output cannot compute pictures or sound though it should; none for others."""
    if not comparison.failed:
        return ()
    return (
        Check(
            name=f"{comparison.sense}.unreadable",
            value=1.0,
            limit=0.0,
            comparison="<=",
            passed=False,
            against="itself",
            unit="count",
        ),
    )


def explain(comparison: PictureComparison | None) -> tuple[str, str]:
    """Return why an output cannot compute pictures or sound, and what to do."""
    failed, sense = (comparison.failed, comparison.sense) if comparison else ("", Sense.PICTURES)
    return f"it cannot compute {sense}: {failed}", REMEDY


def worse(text: Verdict, comparison: PictureComparison | None) -> Verdict:
    """Return the worse of two verdicts on what is kept: on text, and behind pictures or sound."""
    if comparison is None:
        return text
    return min(text, comparison.fit, key=lambda verdict: _WORST_FIRST.index(verdict.answer))

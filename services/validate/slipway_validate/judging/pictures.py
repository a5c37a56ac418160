"""Judge an output of a model that takes images or sound by its results behind pictures or sound, as by those on text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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
_EARLIER = "the reference has no {sense}: an earlier version made it, or max_logit_bytes leaves no room for {sense}"
EARLIER = {each: _EARLIER.format(sense=each) for each in Sense}
"""Why a reference has no results of a sense that its model has."""
_ON_TEXT_ALONE = (
    "the model takes images or sound too, and its outputs were compared on text alone{why}: of the parts for images and sound, only the stored "
    "weights that the adapter changes were"
)
_NOT_ON_OTHER = (
    "the model takes {other} too, and its outputs were compared on text and {sense}{why}: of the part for {other}, only the stored weights that the "
    "adapter changes were"
)
_PARTS = {Sense.PICTURES: ("vision_config", "images"), Sense.SOUND: ("audio_config", "sound")}
"""The setting of the part of a model for each sense, and what it takes."""
_WORST_FIRST = (Answer.FAILED, Answer.WARNING, Answer.PASSED, Answer.NOT_JUDGED)


def describe_effect(looked: Looked | None, effect: float | None, *, expected: Sense | None) -> PictureEffect | None:
    """Describe what the reference computes of prompts with a picture or sound; None for a model that takes none.

    Args:
        looked: What its runner wrote; None if it was not asked for them.
        effect: Distance of the base behind them.
        expected: What it should have been asked for; None for nothing.
    """
    if looked is None:
        return PictureEffect(sense=expected, not_run=EARLIER[expected]) if expected else None
    why = looked.not_run or looked.failed
    return PictureEffect(
        sense=looked.sense,
        pictures=looked.pictures,
        tokens=looked.pictures * looked.tokens,
        effect_kl=effect,
        not_run=why,
    )


def describe_effects(
    reference: Path | None, effects: Mapping[Sense, float | None], *, expected: Sequence[Sense]
) -> dict[Sense, PictureEffect]:
    """Describe what the reference computes of prompts with pictures and with sound; empty for a model that takes neither.

    Args:
        reference: Folder of its results; None without a reference.
        effects: Distance of the base behind each.
        expected: What it should have been asked for.
    """
    looked = {each: Looked.read(reference, each) for each in Sense} if reference else {}
    missing = expected if reference is not None and not any(looked.values()) else ()
    described = {
        each: describe_effect(said, effects.get(each), expected=each if each in missing else None)
        for each, said in looked.items()
    }
    return {each: effect for each, effect in described.items() if effect}


def list_warnings(config: ModelConfig, effects: Mapping[Sense, PictureEffect]) -> list[str]:
    """Return warnings of inputs beside text on which nothing was compared, and of an adapter that changes almost nothing behind them."""
    run = {sense: effect for sense, effect in effects.items() if not effect.not_run}
    why = {sense: f" ({printable(effect.not_run)})" for sense, effect in effects.items() if effect.not_run}
    if not run:
        return [_ON_TEXT_ALONE.format(why=next(iter(why.values()), ""))]
    weak = choose_measure(Comparison.NEXT_TOKEN, width=0).weak_effect
    return [
        *(
            _NOT_ON_OTHER.format(other=name, sense=" and ".join(run), why=why.get(sense, ""))
            for sense, (setting, name) in _PARTS.items()
            if sense not in run and config.get(setting) is not None
        ),
        *(
            f"the adapter has almost no effect {sense.place} (mean KL to the base {effect.effect_kl:.2g} nats/token): what is kept of it "
            "there is judged by distance"
            for sense, effect in run.items()
            if effect.effect_kl is not None and effect.effect_kl < weak
        ),
    ]


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


def explain(comparison: PictureComparison) -> tuple[str, str]:
    """Return why an output cannot compute pictures or sound, and what to do."""
    return f"it cannot compute {comparison.sense}: {comparison.failed}", REMEDY


def worse(text: Verdict, *comparisons: PictureComparison | None) -> Verdict:
    """Return the worst of several verdicts on what is kept: on text, and behind pictures and sound."""
    verdicts = (text, *(each.fit for each in comparisons if each is not None))
    return min(verdicts, key=lambda verdict: _WORST_FIRST.index(verdict.answer))

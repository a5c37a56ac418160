"""Describe the reference for the report."""

from __future__ import annotations

from slipway.stage import Context
from slipway.validation.findings import Reference
from slipway.validation.speed import Engine, Speed
from slipway_validate.judging.measures import distance_of
from slipway_validate.judging.reference_run import ReferenceRun

DESCRIPTION = "base + adapter, unmerged (peft), computed in float32 by transformers on the CPU"
PLAIN = "the base model itself, without an adapter, computed in float32 by transformers on the CPU"
NOT_COMPARED = "not run: compare_outputs is off, so outputs were only loaded and run"


def describe(run: ReferenceRun | None, speed: Speed | None) -> Reference:
    """Describe the reference for the report; without a run, say that outputs were not compared."""
    if run is None:
        return Reference(description=NOT_COMPARED, engine=Engine(runtime=""))
    effect = run.adapter_effect
    return Reference(
        description=DESCRIPTION if run.with_adapter else PLAIN,
        architecture=run.result.architecture,
        adapter=run.result.adapter,
        engine=run.result.engine or Engine(runtime="transformers"),
        perplexity=run.perplexity,
        base_perplexity=run.base_perplexity,
        gain_per_window=run.gain_per_window,
        evidence=run.evidence,
        adapter_effect_kl=effect.mean_kl if effect else None,
        adapter_effect_error=effect.relative_error if effect else None,
        logit_scale=run.logit_scale,
        arithmetic_noise=run.noise,
        memory=run.result.memory,
        load_seconds=run.result.load_seconds,
        speed=speed,
    )


def warn_of_weak_effect(reference: ReferenceRun, ctx: Context) -> None:
    """Warn if the adapter hardly changes the results on this text."""
    effect = distance_of(reference.adapter_effect)
    if effect is None or effect >= reference.measure.weak_effect:
        return
    kl = reference.adapter_effect.mean_kl if reference.adapter_effect else None
    shown = f"mean KL to the base {effect:.2g} nats/token" if kl is not None else f"relative change {effect**0.5:.2g}"
    ctx.warn(f"the adapter has almost no effect on this text ({shown}): give held-out text like its training data")

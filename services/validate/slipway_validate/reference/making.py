"""Make the reference's artifact."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context
from slipway_validate.params import SampleParams
from slipway_validate.preparation import open_trained, prepare, unknown_family
from slipway_validate.reference.describing import warn_of_weak_effect
from slipway_validate.reference.files import NoReferenceError, write_nothing, write_reference
from slipway_validate.reference.running import run_reference


def make_reference(inputs: Mapping[str, Path], params: SampleParams, ctx: Context) -> Path:
    """Run the reference and return the folder of its results.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: see :func:`slipway_validate.reference.stage.run`.
        StageError: ``CANCELLED``, ``DISK_FULL``.
    """
    work, folder = ctx.workdir / "runs", ctx.workdir / "reference"
    work.mkdir()
    folder.mkdir()
    try:
        trained = open_trained(inputs, work)
        family = trained.family
        if family is None:
            return _without_results(folder, params, ctx, why=unknown_family(trained.config))
        prepared = prepare(inputs, trained, family, params, ctx, work=work)
        with run_reference(inputs, prepared, params, ctx, folder=work / "reference") as (run, _):
            pass
        warn_of_weak_effect(run, ctx)
        write_reference(folder, run, prepared, params, ctx)
        ctx.record(samples=len(prepared.samples.tokens), perplexity=run.perplexity, adapter=run.result.adapter)
    except NoReferenceError as none:
        return _without_results(folder, params, ctx, why=none.message)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _without_results(folder: Path, params: SampleParams, ctx: Context, *, why: str) -> Path:
    """Write that there is nothing to compare with; the validation says why of every output."""
    write_nothing(folder, params, ctx, why=why)
    ctx.record(reference=f"none: {why}")
    return folder

"""Let a model compute the prompts with a picture or sound, and write its results; a model that cannot says so by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from slipway.proof.numerics import Ints, Logits
from slipway.proof.runtime import NOT_BY_LAYERS, LanguageModel, NotRunnable, Samples, Unusable
from slipway.proof.sights import Sight, read_sights, write_sights
from slipway.validation.pictures import Sense
from slipway_validate.protocol.messages import BASE_LOGITS_FILE, LOGITS_FILE, RunSpec
from slipway_validate.protocol.pictures import Looked

Report = Callable[[str, int, int], None]


def look(model: LanguageModel, sights: list[Sight], *, report: Report) -> Logits:
    """Return the results behind each picture or sound, (N, P, V), N = prompts, P = tokens.

    Raises:
        NotRunnable: The model takes none.
        Unusable: It cannot compute them.
    """
    if any(each.sense is Sense.SOUND for each in sights) and not model.hears:
        raise NotRunnable(f"{model.engine.runtime} is given no sound here")
    results = []
    for number, sight in enumerate(sights):
        results.append(model.look(sight))
        report(sight.sense.value, number + 1, len(sights))
    if len({each.shape for each in results}) != 1:
        shapes = sorted({each.shape for each in results})
        raise Unusable(f"its results {sights[0].sense.place} have the shapes {shapes}")
    return np.stack(results)


def look_at_given(model: LanguageModel, spec: RunSpec, folder: Path, *, report: Report) -> None:
    """Write what an output computes of the reference's prompts; an error becomes its finding, and leaves the results on text as they are."""
    for sense in Sense:
        if (spec.samples / sense).is_dir():
            _look_at_given(model, spec, folder, sense, report)


def _look_at_given(model: LanguageModel, spec: RunSpec, folder: Path, sense: Sense, report: Report) -> None:
    (folder / sense).mkdir()
    try:
        results = look(model, read_sights(spec.samples, sense), report=report)
        np.save(folder / sense / LOGITS_FILE, results)
        finding = Looked(sense=sense, pictures=len(results), tokens=results.shape[1])
    except NotRunnable as error:
        finding = Looked(sense=sense, not_run=str(error))
    except Unusable as error:
        finding = Looked(sense=sense, failed=str(error))
    except Exception as error:  # noqa: BLE001 - a runtime's errors share no base
        finding = Looked(sense=sense, failed=f"{type(error).__name__}: {error}")
    finding.write(folder)


def look_as_reference(model: Any, spec: RunSpec, folder: Path, *, report: Report) -> None:
    """Make prompts for the reference's model, compute them with and without its adapter, and write both; an error says why there are none."""
    from slipway_validate.runner.pictures.making import NoPicturesError, senses_of

    for sense in senses_of(model.module.config):
        (folder / sense).mkdir()
        try:
            finding = _look_as_reference(model, spec, folder, sense, report)
        except NoPicturesError as error:
            finding = Looked(sense=sense, not_run=str(error))
        except Exception as error:  # noqa: BLE001 - code of transformers' classes raises anything, and text is compared without it
            why = f"the model does not compute a {sense.one} of its own: {type(error).__name__}: {error}"
            finding = Looked(sense=sense, not_run=why)
        if finding.not_run:  # nobody is to find half of the results
            shutil.rmtree(spec.samples / sense, ignore_errors=True)
            for name in (LOGITS_FILE, BASE_LOGITS_FILE):
                (folder / sense / name).unlink(missing_ok=True)
        finding.write(folder)


def _look_as_reference(model: Any, spec: RunSpec, folder: Path, sense: Sense, report: Report) -> Looked:
    from slipway_validate.runner.pictures.making import NoPicturesError, make_sights
    from slipway_validate.runner.runtime_reference import ReferenceModel

    if spec.by_layers:
        raise NoPicturesError(NOT_BY_LAYERS)
    module = model.module
    plain = module.get_base_model() if hasattr(module, "get_base_model") else module
    windows: Ints = Samples.read(spec.samples).tokens
    longest = model.bounds.sequence
    sights = make_sights(plain, spec.model, windows, count=spec.pictures, longest=longest, sense=sense)
    sights = _continued(module, sights)
    results = look(model, sights, report=report)
    sides = {LOGITS_FILE: results}
    if isinstance(model, ReferenceModel):
        sides[BASE_LOGITS_FILE] = _without_adapter(model, sights, report)
    if not all(np.isfinite(each).all() for each in sides.values()):
        raise NoPicturesError(f"the model's own results {sense.place} contain NaN or infinity")
    for name, values in sides.items():
        np.save(folder / sense / name, values)
    write_sights(sights, spec.samples)
    return Looked(sense=sense, pictures=len(results), tokens=results.shape[1])


def _continued(module: Any, sights: list[Sight]) -> list[Sight]:
    """Return the prompts with the model's continuations, all equally long; as they are if its class writes none."""
    from slipway_validate.runner.pictures.making import continue_sight

    with suppress(ValueError, RuntimeError, LookupError, TypeError, AttributeError):
        longer = [continue_sight(module, each) for each in sights]
        if len({each.continued for each in longer}) == 1:
            return longer
    return sights


def _without_adapter(model: Any, sights: list[Sight], report: Report) -> Logits:
    with model.without_adapter():
        return look(model, sights, report=report)

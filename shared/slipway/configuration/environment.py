"""The ``EXPORT_*`` variables: one per setting."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from slipway.configuration.layers import Layer, Setting
from slipway.configuration.schema import keys, parse_text
from slipway.errors import ConfigurationError
from slipway.formats.registry import formats
from slipway.settings.problems import Problem
from slipway.texts import MalformedText

PREFIX = "EXPORT_"

_COMMON: Mapping[str, str] = {
    "EXPORT_CHECKPOINT_PATH": "checkpoint.path",
    "EXPORT_AUTO_DETECT_LATEST": "checkpoint.auto_detect_latest",
    "EXPORT_CHECKPOINT_SELECT": "checkpoint.select",
    "EXPORT_COMBINE_ADAPTERS": "combination.adapters",
    "EXPORT_COMBINE_WEIGHTS": "combination.weights",
    "EXPORT_COMBINE_TYPE": "combination.type",
    "EXPORT_COMBINE_DENSITY": "combination.density",
    "EXPORT_COMBINE_MAJORITY_SIGN": "combination.majority_sign",
    "EXPORT_COMBINE_SEED": "combination.seed",
    "EXPORT_BASE_MODEL": "base_model.name",
    "EXPORT_LOAD_IN_4BIT": "base_model.load_in_4bit",
    "EXPORT_MERGE_ONTO": "base_model.merge_onto",
    "EXPORT_BASE_MODEL_TRUST": "base_model.trust",
    "EXPORT_QUANTIZATION_LEVEL": "optimization.quantization",
    "EXPORT_GROUP_SIZE": "optimization.group_size",
    "EXPORT_REMOVE_ARTIFACTS": "optimization.remove_artifacts",
    "EXPORT_COMPRESS_WEIGHTS": "optimization.compress_weights",
    "EXPORT_ENABLE_VALIDATION": "validation.enabled",
    "EXPORT_TEST_SAMPLES": "validation.test_samples",
    "EXPORT_COMPARE_OUTPUTS": "validation.compare_outputs",
    "EXPORT_BENCHMARK_PERFORMANCE": "validation.benchmark_performance",
    "EXPORT_HELDOUT": "validation.heldout",
    "EXPORT_VALIDATION_LIMITS": "validation.limits",
    "EXPORT_OUTPUT_DIR": "output.directory",
    "EXPORT_NAMING_PATTERN": "output.naming_pattern",
    "EXPORT_RECOVERY_PROFILE": "recovery.profile",
    "EXPORT_MAX_ATTEMPTS": "recovery.max_attempts",
    "EXPORT_MAX_MEMORY_BYTES": "resources.max_memory_bytes",
    "EXPORT_THREADS": "resources.threads",
    "EXPORT_STAGE_TIMEOUT_SECONDS": "resources.stage_timeout_seconds",
    "EXPORT_STAGE_TIMEOUTS": "resources.stage_timeouts",
    "EXPORT_LOG_LEVEL": "log.level",
}

_OF_FORMATS = {
    each.variable(setting): f"formats.{name}.{setting}"
    for name, each in formats().items()
    for setting in each.settings.model_fields
}
ENVIRONMENT: Mapping[str, str] = {**_COMMON, **_OF_FORMATS}
"""Setting of each variable. Commas separate the items of a list; an empty variable counts as not set."""


def read_environment(environment: Mapping[str, str]) -> Layer:
    """Read the settings in the ``EXPORT_*`` variables.

    An unknown variable that resembles a known one is a problem, because it is probably a misspelling. Any other unknown
    variable is only a warning, because other programs use this prefix too.
    """
    layer = Layer()
    for name in sorted(environment):
        if layer.is_full:
            break
        text = environment[name]
        if not name.startswith(PREFIX) or not text.strip():
            continue
        if name not in ENVIRONMENT:
            _unknown(name, layer)
            continue
        key = ENVIRONMENT[name]
        try:
            layer.settings[key] = Setting(parse_text(key, text), name)
        except MalformedText as error:
            layer.problems.append(Problem(key, error.message, error.remedy, name))
            layer.broken.add(key)
    return layer


def _unknown(name: str, layer: Layer) -> None:
    close = difflib.get_close_matches(name, sorted(ENVIRONMENT), n=1, cutoff=0.85)
    if close:
        layer.problems.append(
            Problem(name, "is not a variable of Slipway", f"did you mean {close[0]!r}?", "environment")
        )
    else:
        layer.warnings.append(f"environment variable {name} is unknown to Slipway and was ignored")


_shared = sorted(set(_COMMON) & set(_OF_FORMATS))
if _shared:
    raise ConfigurationError(
        f"the setting {_OF_FORMATS[_shared[0]]} of an installed format uses the variable {_shared[0]}, which belongs to {_COMMON[_shared[0]]}",
        reason="FORMAT_INVALID",
        remedy="uninstall the format, or install a version of it that uses another variable",
    )
assert set(ENVIRONMENT.values()) == set(keys()), "every setting has one variable"

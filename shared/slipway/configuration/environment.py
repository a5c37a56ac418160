"""The ``EXPORT_*`` variables: one per setting."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from slipway.configuration.layers import Layer, Setting
from slipway.configuration.schema import from_text, keys
from slipway.errors import ConfigurationError
from slipway.formats.registry import formats
from slipway.settings.problems import Problem

PREFIX = "EXPORT_"

_OWN: Mapping[str, str] = {
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
ENVIRONMENT: Mapping[str, str] = {**_OWN, **_OF_FORMATS}
"""Variable to setting. Lists are separated by commas; an empty variable counts as not set."""


def read_environment(environment: Mapping[str, str]) -> Layer:
    """The settings in the ``EXPORT_*`` variables.

    A variable nobody knows is a problem when it resembles a known one (a misspelling would otherwise be ignored in
    silence), and a warning otherwise: other programs use names of this kind too.
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
            layer.settings[key] = Setting(from_text(key, text), name)
        except ValueError as error:
            message, _, remedy = str(error).partition("|")
            layer.problems.append(Problem(key, message, remedy, name))
            layer.broken.add(key)
    return layer


def _unknown(name: str, layer: Layer) -> None:
    close = difflib.get_close_matches(name, sorted(ENVIRONMENT), n=1, cutoff=0.85)
    if close:
        layer.problems.append(
            Problem(name, "is not a variable of Slipway", f"did you mean {close[0]!r}?", "environment")
        )
    else:
        layer.warnings.append(f"environment variable {name} is not one of Slipway's and was ignored")


_shared = sorted(set(_OWN) & set(_OF_FORMATS))
if _shared:
    raise ConfigurationError(
        f"the setting {_OF_FORMATS[_shared[0]]} of an installed format has the variable {_shared[0]}, which is that of {_OWN[_shared[0]]}",
        reason="FORMAT_INVALID",
        remedy="uninstall the format, or use a version of it with another variable",
    )
assert set(ENVIRONMENT.values()) == set(keys()), "every setting has one variable"

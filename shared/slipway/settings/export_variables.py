"""The ``EXPORT_*`` variables of the settings that every export has; those of formats come from the formats."""

from __future__ import annotations

from collections.abc import Mapping

EXPORT_VARIABLES: Mapping[str, str] = {
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
    "EXPORT_QUANTIZATION_METHOD": "optimization.method",
    "EXPORT_QUANTIZATION_SYMMETRIC": "optimization.symmetric",
    "EXPORT_QUANTIZATION_TIME_BUDGET": "optimization.time_budget",
    "EXPORT_CALIBRATION_DATA": "optimization.calibration",
    "EXPORT_REMOVE_ARTIFACTS": "optimization.remove_artifacts",
    "EXPORT_COMPRESS_WEIGHTS": "optimization.compress_weights",
    "EXPORT_ENABLE_VALIDATION": "validation.enabled",
    "EXPORT_TEST_SAMPLES": "validation.test_samples",
    "EXPORT_COMPARE_OUTPUTS": "validation.compare_outputs",
    "EXPORT_BENCHMARK_PERFORMANCE": "validation.benchmark_performance",
    "EXPORT_VALIDATION_EFFORT": "validation.effort",
    "EXPORT_CONTINUATION_TOKENS": "validation.continuation_tokens",
    "EXPORT_HELDOUT": "validation.heldout",
    "EXPORT_TEST_INPUT_SAMPLES": "validation.test_input_samples",
    "EXPORT_VALIDATION_LIMITS": "validation.limits",
    "EXPORT_ON_FAILURE": "validation.on_failure",
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
"""Setting of each variable."""

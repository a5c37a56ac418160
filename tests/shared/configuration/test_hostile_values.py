"""Any text of a file, variable or flag gives a configuration or an error with a reason, in limited time and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slipway.configuration import ENVIRONMENT, ExportConfiguration, load
from slipway.configuration.schema import keys
from slipway.errors import ConfigurationError
from slipway.rpc.messages import configuration_message, configuration_of
from slipway.security.access.access_file import load_access
from slipway.settings import Settings
from slipway_coordinator.lifecycle.rules import load_rules
from support.hostile.texts import SCALARS, TEXTS, whole_documents, within_bounds, yaml_documents

KEYS = tuple(sorted(keys()))
REASONS = {"CONFIGURATION_INVALID", "CONFIGURATION_NOT_FOUND"}
thorough = settings(max_examples=120, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def read(path: Path | None = None, **sources: Any) -> None:
    """Load a configuration; check that a valid one can also be sent."""
    try:
        loaded = load(path, environment=sources.pop("environment", {}), **sources)
    except ConfigurationError as error:
        assert json.loads(error.about["problems"])
        raise
    assert configuration_of(configuration_message(loaded.configuration)) == loaded.configuration


@contextmanager
def naming(text: str) -> Iterator[None]:
    """Let a failure say of which text it is."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"of the text {text[:500]!r}")
        raise


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "export.yaml"


@pytest.mark.parametrize("number", range(len(whole_documents())))
def test_a_document_that_stands_for_more_than_it_holds_is_refused(file: Path, number: int) -> None:
    document = whole_documents()[number]
    file.write_text(document)
    with within_bounds(allowed=REASONS):
        read(file)
    for load_it, reason in ((load_access, "ACCESS_INVALID"), (load_rules, "CONFIGURATION_INVALID")):
        with within_bounds(allowed={reason}):
            load_it(file)


@pytest.mark.parametrize(
    "key",
    [
        "checkpoint.path",
        "combination.weights",
        "combination.seed",
        "resources.max_memory_bytes",
        "validation.limits",
        "validation.enabled",
        "optimization.group_size",
        "output.naming_pattern",
        "output.destinations",
        "output.license",
        "formats.tensorrt.batch",
    ],
)
def test_every_scalar_is_taken_or_refused_by_every_kind_of_setting(file: Path, key: str) -> None:
    section, _, name = key.rpartition(".")
    for scalar in SCALARS:
        inner = f"{{{name}: {scalar}}}"
        for part in reversed(section.split(".")):
            inner = f"{{{part}: {inner}}}"
        file.write_text(f"export: {inner}\n", errors="surrogatepass")
        with naming(scalar), within_bounds(allowed=REASONS):
            read(file)


@thorough
@given(document=yaml_documents(KEYS))
def test_any_file_is_a_configuration_or_an_error(file: Path, document: str) -> None:
    file.write_text(document)
    with within_bounds(allowed=REASONS):
        read(file)


@thorough
@given(key=st.one_of(st.sampled_from(KEYS), st.sampled_from(TEXTS)), text=st.one_of(st.sampled_from(TEXTS), st.text()))
@example(key="checkpoint.path", text="~nosuchuser/run")
@example(key="base_model.name", text="~nosuchuser")
@example(key="resources.max_memory_bytes", text="9" * 400)
@example(key="resources.stage_timeouts", text="merge=" + "9" * 20)
def test_any_flag_is_a_setting_or_an_error(key: str, text: str) -> None:
    with within_bounds(allowed=REASONS):
        read(assignments=[f"{key}={text}"], flags={"--checkpoint": "run"})
    with within_bounds(allowed=REASONS):
        read(flags={"--checkpoint": text, "--base-model": text, "--out": text})


@thorough
@given(name=st.one_of(st.sampled_from(sorted(ENVIRONMENT)), st.sampled_from(TEXTS).map("EXPORT_{}".format)),
       text=st.one_of(st.sampled_from(TEXTS), st.text()))  # fmt: skip
def test_any_variable_is_a_setting_or_an_error(name: str, text: str) -> None:
    with within_bounds(allowed=REASONS):
        read(environment={name: text, "EXPORT_CHECKPOINT_PATH": "run"} | {name: text})


@pytest.mark.parametrize(
    "name",
    [
        "SLIPWAY_HOME",
        "SLIPWAY_SCRATCH",
        "SLIPWAY_SIGNING_KEY",
        "SLIPWAY_SIGNING_CERTIFICATE",
        "SLIPWAY_STORE",
        "SLIPWAY_CACHE_SIZE",
        "SLIPWAY_OPEN_UPLOADS",
        "SLIPWAY_TRACING",
        "SLIPWAY_AUDIT",
    ],
)
def test_any_setting_of_a_machine_is_taken_or_an_error(name: str) -> None:
    for text in TEXTS:
        with naming(text), within_bounds():
            Settings.from_environment({name: text})


def test_many_wrong_settings_are_counted_and_few_are_named(file: Path) -> None:
    file.write_text("export:\n" + "\n".join(f"  unknown{n}: {n}" for n in range(500)))
    with pytest.raises(ConfigurationError) as raised:
        read(file)
    assert "unknown0" in raised.value.message
    assert " more" in raised.value.message
    assert len(raised.value.message) <= 20_000


def test_every_number_of_the_model_fits_its_message() -> None:
    """The largest value of each setting survives a message."""
    from slipway.settings.sections import LARGEST, LARGEST_BYTES, LARGEST_SEED

    largest = {"min": LARGEST, "opt": LARGEST, "max": LARGEST}
    configuration = ExportConfiguration.model_validate(
        {
            "combination": {"seed": LARGEST_SEED},
            "formats": {"tensorrt": {"batch": largest, "sequence": largest, "past": largest}},
            "resources": {
                "max_memory_bytes": LARGEST_BYTES, "stage_timeout_seconds": LARGEST, "stage_timeouts": {"merge": LARGEST}
            },
        }
    )  # fmt: skip
    assert configuration_of(configuration_message(configuration)) == configuration
    unbounded = [name for name, schema in _numbers(ExportConfiguration.model_json_schema()) if "maximum" not in schema]
    listed = [f"OptimizationConfiguration.{name}" for name in ("group_size", "head_bits")]
    assert unbounded == [*listed, "OnnxConfiguration.opset_version"], "these have lists of values"


def _numbers(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for model, definition in {**schema.get("$defs", {}), "": schema}.items():
        for name, field in definition.get("properties", {}).items():
            rows = field.get("additionalProperties") or {}
            found += [(f"{model}.{name}", each) for each in (field, rows) if each.get("type") == "integer"]
    return sorted(found, key=lambda each: -ord(each[0][1]))

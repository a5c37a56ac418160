"""Plain data is read as a YAML file with it: the same settings, or a typed error."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from slipway.configuration import load
from slipway.errors import ConfigurationError

RUN = {"checkpoint": {"path": "/run"}, "base_model": {"name": "/base"}}


def test_what_a_file_may_say_plain_data_may_say_too() -> None:
    data: dict[str, Any] = {
        "checkpoint": {"path": PurePosixPath("/run")},
        "base_model": {"name": "/base"},
        "validation": None,
        "combination": {"adapters": (Path("/second"),)},
        "output": {"target": None},
        "resources": {"max_memory_bytes": "8GiB"},
    }
    for given in (data, {"export": data}):
        read = load(given, environment={}).configuration
        assert read.checkpoint.path == "/run"
        assert read.combination.adapters == ("/second",)
        assert read.resources.max_memory_bytes == 8 << 30
    assert load({"export": None}, environment={}, flags={"RUN": "/run"}).configuration.checkpoint.path == "/run"


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ([RUN], "is not a table"),
        ({"export": {}, **RUN}, "checkpoint (configuration): is not known beside 'export'"),
        ({"export": 5}, "5 is not a section"),
        ({**RUN, 1: "one"}, "1 (configuration): is not a setting"),
        ({**RUN, "output": "out"}, "output (configuration): 'out' is not a section"),
        ({**RUN, "resources": {"max_memory_bytes": "much"}}, "'much' is not a size"),
    ],
)
def test_other_data_is_a_typed_error(data: Any, part: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(data, environment={})
    assert caught.value.reason == "CONFIGURATION_INVALID"
    assert part in str(caught.value)

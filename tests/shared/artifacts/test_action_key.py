"""Action keys change with everything that changes a result, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

from slipway.artifacts import action_key
from slipway.stage import Hardware
from support.stages.plain import ECHO, EchoParams

INPUTS = {"in": "sha256:" + "1" * 64}


def test_key_follows_what_shapes_the_result() -> None:
    key = action_key(ECHO, INPUTS, EchoParams())
    assert key == action_key(ECHO, dict(INPUTS), EchoParams(text="hello"))
    different = [
        action_key(ECHO, {"in": "sha256:" + "2" * 64}, EchoParams()),
        action_key(ECHO, INPUTS, EchoParams(text="bye")),
        action_key(replace(ECHO, version=2), INPUTS, EchoParams()),
        action_key(replace(ECHO, name="other"), INPUTS, EchoParams()),
        action_key(replace(ECHO, libraries=("pydantic",)), INPUTS, EchoParams()),
    ]
    assert len({key, *different}) == 6


def test_the_gpu_counts_only_where_the_output_depends_on_it() -> None:
    bound = replace(ECHO, hardware=Hardware(device_bound=True))
    assert action_key(ECHO, INPUTS, EchoParams(), gpu_architecture="sm89") == action_key(ECHO, INPUTS, EchoParams())
    assert action_key(bound, INPUTS, EchoParams(), gpu_architecture="sm89") != action_key(bound, INPUTS, EchoParams())

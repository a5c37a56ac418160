"""Keys of patterns are found as peft finds them, also where there are as many as experts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.model.adapters.adapter_config import PatternKeys, parse_adapter_config


def matching(keys: Iterable[str], module: str) -> list[str]:
    """Match keys as ``get_pattern_key`` of peft 0.21 does."""
    return [key for key in keys if re.match(rf"(.*\.)?({key})$", module)]


KEYS = st.text(alphabet="ab.", max_size=4) | st.text(alphabet="ab.^$|\n", max_size=4)


@settings(max_examples=60)
@given(keys=st.lists(KEYS, unique=True, max_size=8), module=st.text(alphabet="ab.\n", max_size=8))
def test_keys_are_those_that_peft_finds(keys: list[str], module: str) -> None:
    found = PatternKeys(keys)
    expected = matching(keys, module)
    assert list(found.matching(module)) == expected
    assert found.first(module) == (expected[0] if expected else module)


def test_the_first_key_decides() -> None:
    assert PatternKeys(["x.a", ".*a", "a"]).first("x.a") == "x.a"
    assert PatternKeys([".*a", "x.a"]).first("x.a") == ".*a"
    assert PatternKeys(["xya", "x.a"]).first("b.xya") == "xya"
    assert PatternKeys(["x.a"]).first("xya") == "x.a"
    assert PatternKeys(["a+b"]).first("a+b") == "a+b"


def test_an_adapter_with_a_rank_for_every_expert() -> None:
    modules = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
        for layer in range(48)
        for expert in range(128)
        for part in ("gate", "up", "down")
    ]
    ranks = {module: 1 + number % 64 for number, module in enumerate(modules)}
    raw = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["up_proj"],
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
    }
    begin = time.process_time()
    config = parse_adapter_config(raw, modules)
    assert len(modules) == 18_432
    assert {module: config.rank_of(module) for module in modules} == ranks
    assert {config.scaling_of(module) for module in modules} == {1.0}
    assert time.process_time() - begin < 5, "and not the hours of every key against every module"

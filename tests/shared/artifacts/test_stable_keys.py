"""Action keys stay what they are: another key of a stage means that its results in users' stores are computed anew.

A stage whose results change gets another version, and so another key. Then write the table again, and say so in the changelog:

    python tests/shared/artifacts/test_stable_keys.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipway.artifacts import action_key
from slipway.registry import load_stage, stage_names

TABLE = Path(__file__).with_name("stable_keys.json")
DIGEST = "sha256:" + "1" * 64
REQUIRED: dict[str, dict[str, Any]] = {
    "answer": {"prompt": "one"},
    "quantize": {"format": "pytorch", "level": "int4"},
}
"""Parameters without a default, by stage."""


def keys() -> dict[str, dict[str, Any]]:
    """Return version and key of each stage with the defaults of its parameters, as if all its libraries had one version."""
    found = {}
    for name in stage_names():
        stage = load_stage(name)
        same = replace(stage, libraries=())  # a library's new version is a new key, and no fault
        params = stage.params.model_validate(REQUIRED.get(name, {}))
        key = action_key(same, dict.fromkeys(stage.inputs, DIGEST), params)
        found[name] = {"version": stage.version, "libraries": list(stage.libraries), "key": key}
    return found


def test_the_keys_of_all_stages_are_those_of_before() -> None:
    assert keys() == json.loads(TABLE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    TABLE.write_text(json.dumps(keys(), indent=2) + "\n", encoding="utf-8")

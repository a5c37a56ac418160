"""Action keys: hashes of everything that decides a stage's result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from slipway.artifacts.digests import is_digest
from slipway.files.json_documents import parse_json
from slipway.stage import Stage, StageParams

_MOST_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class ActionResult:
    """Result of a stage: the digest of each output by name, and the facts it recorded."""

    outputs: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the bytes that a store keeps."""
        return json.dumps({"outputs": self.outputs, "facts": self.facts}, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """Read the bytes that a store kept; return None if they are damaged."""
        try:
            document = parse_json(data, most_values=_MOST_VALUES, lenient=True)
            outputs, facts = document["outputs"], document["facts"]
        except (ValueError, KeyError, TypeError):
            return None
        if not isinstance(outputs, dict) or not isinstance(facts, dict):
            return None
        right = all(isinstance(digest, str) and is_digest(digest) for digest in outputs.values())
        return cls(outputs=outputs, facts=facts) if right else None


def action_key(stage: Stage[Any], inputs: Mapping[str, str], params: StageParams, *, gpu_architecture: str = "") -> str:
    """Return the key of a result before it is made, as 64 hexadecimal digits.

    Args:
        stage: The stage; its name, version and the versions of its libraries are part of the key.
        inputs: Digest of each input by name.
        params: Validated parameters.
        gpu_architecture: For example ``sm89``; used only for stages whose output depends on it.
    """
    document = {
        "stage": stage.name,
        "version": stage.version,
        "inputs": dict(inputs),
        "params": params.model_dump(mode="json"),
        "libraries": stage.library_versions(),
        "gpu_architecture": gpu_architecture if stage.hardware.device_bound else "",
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

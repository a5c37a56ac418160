"""Render a chat template with jinja2, in a process that :mod:`slipway_gguf.modelfile` starts, because a template may never end."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

_LONGEST = 1 << 16


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def render(template: str, conversations: list[dict[str, Any]]) -> list[str]:
    """Return the beginnings of the rendered conversations. The template runs in jinja2's sandbox, with transformers' filters and globals."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    compiled = environment.from_string(template)
    return [compiled.render(add_generation_prompt=True, **each)[:_LONGEST] for each in conversations]

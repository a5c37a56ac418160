"""The process in which :mod:`slipway_gguf.conversations` renders a chat template, which is a program that may not end.

Standard input has seconds, the template and the conversations as JSON; the process writes the rendered texts as JSON, or ends with an
error. The template has what transformers gives it, in jinja2's sandbox.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

_MEMORY = 1 << 30
_LONGEST = 1 << 16


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def main() -> None:
    """Render the conversations; the kernel ends this process when its time is over."""
    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    template = environment.from_string(request["template"])
    texts = [template.render(add_generation_prompt=True, **each)[:_LONGEST] for each in request["conversations"]]
    json.dump(texts, sys.stdout)


if __name__ == "__main__":
    main()

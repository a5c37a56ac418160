"""Call Helm as a library, in an environment of its own: a JSON list of calls on standard input, one of answers on standard output.

Run by tests/support/manifests/chart.py. A call is ``{"do": …}`` with the arguments of that function; an answer is ``{"value": …}``, or
``{"error": …, "kind": …}`` with what Helm says and the name of its error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import helm_python


def _render(chart: str, values: dict[str, Any], **options: Any) -> dict[str, str]:
    with helm_python.Chart.load(chart) as loaded:
        return loaded.render(values, **options)


def _install(chart: str, values: dict[str, Any], *, name: str, namespace: str) -> dict[str, Any]:
    """Do what ``helm install --dry-run=client`` does."""
    with helm_python.Config(namespace=namespace, storage_driver="memory") as config:
        return config.install(chart, name, values, namespace=namespace, dry_run="client")


_CALLS = {"render": _render, "install": _install, "lint": helm_python.lint, "package": helm_python.package}


def _answer(call: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": _CALLS[call.pop("do")](**call)}
    except helm_python.HelmError as error:
        return {"error": str(error), "kind": type(error).__name__}


json.dump([_answer(call) for call in json.load(sys.stdin)], sys.stdout)

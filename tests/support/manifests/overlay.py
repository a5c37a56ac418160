"""Render an overlay into objects that rules can examine."""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

ROOT = Path(__file__).parents[3]
OVERLAYS = sorted(path.parent.name for path in (ROOT / "k8s" / "overlays").glob("*/kustomization.yaml"))

NAMESPACE = "slipway"
CERTIFICATE_KEYS = {"ca.crt", "tls.crt", "tls.key"}
EXTERNAL_SECRETS = {"slipway-state": {"pg_service.conf"}, "slipway-s3": {"credentials"}}
"""Objects that an administrator provides; named in docs/kubernetes.md."""

Object = dict[str, Any]


def render(folder: Path) -> list[Object]:
    """Return the objects of a kustomization."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl renders the overlays, and is not on this machine")
    command = ["kubectl", "kustomize", str(folder)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))  # as safe_load_all, but ten times as fast


@cache
def _objects(overlay: str) -> list[Object]:
    return render(ROOT / "k8s" / "overlays" / overlay)


def rendered(overlay: str) -> list[Object]:
    """Return a new copy of the objects of an overlay."""
    return copy.deepcopy(_objects(overlay))


@dataclass(frozen=True)
class Workload:
    """A workload whose pods have one container."""

    object: Object
    settings: dict[str, str]

    @property
    def kind(self) -> str:
        return str(self.object["kind"])

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def template(self) -> Object:
        """Return the template of its pods."""
        spec = self.object["spec"]
        return dict(spec["jobTemplate"]["spec"]["template"] if self.kind == "CronJob" else spec["template"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def pod(self) -> Object:
        return dict(self.template["spec"])

    @property
    def container(self) -> Object:
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def program(self) -> str:
        """Return the name of the service that runs, or ``slipway`` for another command."""
        slipway, *service = self.container["command"]
        assert slipway == "slipway"
        return str(service[0]) if service else "slipway"

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", ())}

    @property
    def environment(self) -> dict[str, str]:
        """Variables; a reference to a secret is written ``secret:NAME/KEY``, to a field of the pod ``field:PATH``."""
        found = dict(self.settings)
        for variable in self.container.get("env", ()):
            match variable.get("valueFrom", {}):
                case {"secretKeyRef": secret}:
                    value = f"secret:{secret['name']}/{secret['key']}"
                case {"fieldRef": field}:
                    value = f"field:{field['fieldPath']}"
                case _:
                    value = variable["value"]
            found[variable["name"]] = value
        return found

    def arguments(self) -> argparse.Namespace:
        """Return the arguments as the program itself parses them; SystemExit if it refuses them.

        A command of the command line is in ``command``; it listens nowhere.
        """
        from slipway.service_flags import worker_parser
        from slipway_coordinator.service import coordinator_parser

        parsers = {"worker": worker_parser, "coordinator": coordinator_parser}
        # Parsers take defaults from the environment, and this one is not the pod's.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLIPWAY_")}
        with mock.patch.dict(os.environ, {**kept, **self.environment}, clear=True):
            if self.program == "slipway":
                return understood(list(self.container["args"]))
            return parsers[self.program](self.program).parse_args(self.container.get("args", []))


@dataclass(frozen=True)
class Cluster:
    """All objects of an overlay, and the place of its database."""

    objects: list[Object]
    database: str = "*/postgresql 5432"
    """Place of the service in the Secret ``slipway-state``; a pod by default, because manifests contain no Secret."""

    def of(self, kind: str) -> list[Object]:
        return [thing for thing in self.objects if thing["kind"] == kind]

    def names(self, kind: str) -> set[str]:
        return {thing["metadata"]["name"] for thing in self.of(kind)}

    def named(self, kind: str, name: str) -> Object:
        return next(thing for thing in self.of(kind) if thing["metadata"]["name"] == name)

    def workloads(self) -> list[Workload]:
        made = [Workload(thing, {}) for kind in ("Deployment", "Job", "CronJob") for thing in self.of(kind)]
        return [replace(one, settings=self._settings(one.pod)) for one in made]

    def workers(self) -> list[Workload]:
        return [one for one in self.workloads() if one.program == "worker"]

    def selected(self, selector: Object) -> list[Workload]:
        return [one for one in self.workloads() if matches(selector, one.labels)]

    def _settings(self, pod: Object) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in pod["containers"][0].get("envFrom", ()):
            name = source["configMapRef"]["name"]
            if name in self.names("ConfigMap"):
                found.update(data_of(self.named("ConfigMap", name)))
        return found


def data_of(config_map: Object) -> dict[str, str]:
    """Return what a ConfigMap holds; one that nothing was added to has no field for it."""
    return dict(config_map.get("data", {}))


def understood(words: list[str]) -> argparse.Namespace:
    """Return the command line's parsed arguments."""
    import typer
    from typer.exceptions import TyperException

    from slipway.cli.app import app

    command: Any = typer.main.get_command(app)
    named: list[str] = []
    while hasattr(command, "commands"):
        named.append(words.pop(0))
        if named[-1] not in command.commands:
            raise SystemExit(2)
        command = command.commands[named[-1]]
    try:
        given = command.make_context(named[-1], words).params
    except TyperException as error:
        raise SystemExit(2) from error
    return argparse.Namespace(**given, command=" ".join(named), listen="", metrics="")


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """Return whether a label selector matches; an empty one matches everything."""
    wanted = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


def walk(value: Any) -> Iterator[Object]:
    """Yield every mapping inside a value."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


def port_of(address: str) -> int:
    """Return the port of ``HOST:PORT`` or a URL."""
    port = address.rpartition(":")[2].partition("/")[0]
    return int(port) if port else {"http": 80, "https": 443}[address.partition(":")[0]]


def host_of(address: str) -> str:
    _, separator, rest = address.rpartition("://")
    return rest.rpartition(":")[0] or rest if separator else address.rpartition(":")[0]


def place_of(url: str) -> str:
    """Return the namespace of a URL, or ``outside``, and the port, as in a rule of a network policy."""
    host = host_of(url)
    return f"{host.split('.')[1] if host.endswith('.svc') else 'outside'} {port_of(url)}"


def stages_of(one: Workload) -> list[str]:
    (argument,) = (text for text in one.container["args"] if text.startswith("--stage="))
    return sorted(str(argument).removeprefix("--stage=").split(","))

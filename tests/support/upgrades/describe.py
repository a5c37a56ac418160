"""Print as JSON what the version of Slipway that runs this file has; each of two versions runs it with its own Python.

It uses only names that the earlier version has, too.
"""

from __future__ import annotations

import importlib
import json
import pkgutil

import slipway_protos.v1 as protos
from slipway.errors import ModelExportError
from slipway.registry import load_stage, stage_names
from slipway_coordinator.storage.migrations import MIGRATIONS
from slipway_protos.v1.configuration_pb2 import ExportConfiguration


def stages() -> dict[str, object]:
    """Return the parts of action keys that a version decides, by stage; without stages whose libraries are not installed."""
    found: dict[str, object] = {}
    for name in stage_names():
        try:
            stage = load_stage(name)
        except ModelExportError:
            continue
        found[name] = [stage.version, dict(stage.library_versions())]
    return found


def calls() -> list[str]:
    """Return the paths of all calls of the API."""
    modules = [name for _, name, _ in pkgutil.iter_modules(protos.__path__) if name.endswith("_pb2")]
    files = [importlib.import_module(f"{protos.__name__}.{name}").DESCRIPTOR for name in modules]
    services = [service for file in files for service in file.services_by_name.values()]
    return sorted(f"/{service.full_name}/{method.name}" for service in services for method in service.methods)


def settings(message: object = ExportConfiguration.DESCRIPTOR, path: str = "") -> list[str]:
    """Return the paths of the fields that a configuration has in a request."""
    found = []
    for field in message.fields:  # type: ignore[attr-defined]
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            found.append(f"{path}{field.name}")
        elif field.message_type.file == ExportConfiguration.DESCRIPTOR.file:
            found += settings(field.message_type, f"{path}{field.name}.")
    return sorted(found)


if __name__ == "__main__":
    print(json.dumps({"stages": stages(), "migrations": len(MIGRATIONS), "calls": calls(), "settings": settings()}))

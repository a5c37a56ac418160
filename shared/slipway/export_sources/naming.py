"""Which sources a configuration names, and which of them workers can import by themselves."""

from __future__ import annotations

from collections.abc import Collection

from slipway.configuration import ExportConfiguration
from slipway.sources.allowed import is_url


def source_settings(configuration: ExportConfiguration) -> dict[str, str]:
    """What the configuration names for each source, by the source's name; an empty base is the one that the adapter names."""
    combined = {f"adapter-{number:02}": path for number, path in enumerate(configuration.combination.adapters, 2)}
    adapter = {"adapter": configuration.checkpoint.path} if configuration.checkpoint.path else {}
    named = {"base": configuration.base_model.name, **adapter, **combined}
    validation = configuration.validation
    return named | ({"heldout": validation.heldout} if validation.enabled and validation.heldout else {})


def sources_to_import(configuration: ExportConfiguration, given: Collection[str] = ()) -> dict[str, str]:
    """Addresses of the sources that were not brought and that a worker can import, by the source's name.

    The address of a base is empty where an adapter that is imported names it.

    Args:
        configuration: What the export shall do.
        given: Names of the sources that were brought.
    """
    named = source_settings(configuration)
    found = {name: url for name, url in named.items() if name not in given and is_url(url)}
    if "adapter" in found and "base" not in given and not named["base"]:
        found["base"] = ""
    return found

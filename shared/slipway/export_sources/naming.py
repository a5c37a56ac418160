"""List the sources that a configuration names, and those that workers can import themselves; title an export by its sources."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from slipway.configuration import ExportConfiguration
from slipway.planning.calibration import SOURCE as CALIBRATION
from slipway.planning.calibration import names_calibration
from slipway.planning.references import by_source_name
from slipway.sources.addresses import is_url
from slipway.texts import one_line
from slipway.validation.inputs import TEST_INPUTS


def source_settings(configuration: ExportConfiguration) -> dict[str, str]:
    """Return the configured value of each source, by source name; an empty base means the one that the adapter names."""
    combined = by_source_name(configuration.combination.adapters)
    adapter = {"adapter": configuration.checkpoint.path} if configuration.checkpoint.path else {}
    named = {"base": configuration.base_model.name, **adapter, **combined}
    validation = configuration.validation
    named |= {CALIBRATION: configuration.optimization.calibration} if names_calibration(configuration) else {}
    if not validation.enabled:
        return named
    inputs = validation.test_input_samples
    return (
        named
        | ({"heldout": validation.heldout} if validation.heldout else {})
        | ({TEST_INPUTS: inputs} if isinstance(inputs, str) and inputs else {})
    )


def sources_to_import(configuration: ExportConfiguration, given: Collection[str] = ()) -> dict[str, str]:
    """Return the addresses of the sources that a worker can import, by source name, without the uploaded ones.

    The address of the base is empty if an imported adapter names it.

    Args:
        configuration: Settings of the export.
        given: Names of the uploaded sources.
    """
    named = source_settings(configuration)
    addresses = {name: url for name, url in named.items() if name not in given and is_url(url)}
    if "adapter" in addresses and "base" not in given and not named["base"]:
        addresses["base"] = ""
    return addresses


def title(labels: Mapping[str, str], *, more: Sequence[str] = ()) -> str:
    """Return a title such as ``checkpoint-40 of h_half onto qwen3-base``; empty for an export that does not name its sources.

    Args:
        labels: Labels of the export: ``checkpoint``, ``model_name`` and ``base_model``.
        more: Names of the adapters combined with the checkpoint's.
    """
    checkpoint, run, base = (one_line(labels.get(name, "")) for name in ("checkpoint", "model_name", "base_model"))
    what = f"{checkpoint} of {run}" if checkpoint and run and checkpoint != run else checkpoint or run
    if not what:
        return ""
    joined = f" with {', '.join(more)}" if more else ""
    return f"{what}{joined} onto {base}" if base else f"{what}{joined}"

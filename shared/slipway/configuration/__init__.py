"""The configuration of an export: frozen, and read from a YAML file, ``EXPORT_*`` variables and command-line flags.

:func:`load` reads all three (later ones win) and reports every problem at once. :func:`parse` checks plain data that arrives
another way, for example over the network, by the same rules.
"""

from slipway.configuration.export import ExportConfiguration
from slipway.configuration.formats import FormatsConfiguration
from slipway.configuration.layers import ENVIRONMENT
from slipway.configuration.loading import LoadedConfiguration, load, parse
from slipway.configuration.sections import (
    BaseModelConfiguration,
    CheckpointConfiguration,
    ExecutionConfiguration,
    LogConfiguration,
    OptimizationConfiguration,
    OutputConfiguration,
    RecoveryConfiguration,
    ResourcesConfiguration,
    ValidationConfiguration,
)
from slipway.configuration.values import files_address, render_address, render_name

__all__ = [
    "ENVIRONMENT",
    "BaseModelConfiguration",
    "CheckpointConfiguration",
    "ExecutionConfiguration",
    "ExportConfiguration",
    "FormatsConfiguration",
    "LoadedConfiguration",
    "LogConfiguration",
    "OptimizationConfiguration",
    "OutputConfiguration",
    "RecoveryConfiguration",
    "ResourcesConfiguration",
    "ValidationConfiguration",
    "files_address",
    "load",
    "parse",
    "render_address",
    "render_name",
]

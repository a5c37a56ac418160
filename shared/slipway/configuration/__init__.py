"""What an export shall do: one frozen model, read from a YAML file, ``EXPORT_*`` variables and command-line flags.

:func:`load` reads all three, later ones winning, and reports every problem at once; :func:`parse` is the same gate for
plain data that arrives another way, for example over the network.
"""

from slipway.configuration.environment import ENVIRONMENT
from slipway.configuration.loading import LoadedConfiguration, load, parse
from slipway.configuration.model import ExportConfiguration
from slipway.configuration.naming import render_name
from slipway.configuration.problems import Problem
from slipway.configuration.sections import (
    BaseModelConfiguration,
    CheckpointConfiguration,
    DimensionRange,
    FormatsConfiguration,
    LogConfiguration,
    OnnxConfiguration,
    OptimizationConfiguration,
    OutputConfiguration,
    PyTorchConfiguration,
    RecoveryConfiguration,
    ResourcesConfiguration,
    TensorRTConfiguration,
    ValidationConfiguration,
)
from slipway.configuration.values import FORMAT_LEVELS, Level

__all__ = [
    "ENVIRONMENT",
    "FORMAT_LEVELS",
    "BaseModelConfiguration",
    "CheckpointConfiguration",
    "DimensionRange",
    "ExportConfiguration",
    "FormatsConfiguration",
    "Level",
    "LoadedConfiguration",
    "LogConfiguration",
    "OnnxConfiguration",
    "OptimizationConfiguration",
    "OutputConfiguration",
    "Problem",
    "PyTorchConfiguration",
    "RecoveryConfiguration",
    "ResourcesConfiguration",
    "TensorRTConfiguration",
    "ValidationConfiguration",
    "load",
    "parse",
    "render_name",
]

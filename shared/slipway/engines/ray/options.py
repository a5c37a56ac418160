"""Options of Ray for single stages, from the file that ``SLIPWAY_RAY_OPTIONS`` names.

::

    default:                              # of every stage
      num_cpus: 4
    gguf:
      memory: 16GiB
      resources: {local_disk: 1}          # a custom resource of the cluster
      runtime_env: {pip: ["slipway-ml[gguf]"]}
    tensorrt_build:
      num_gpus: 1
      label_selector: {ray.io/accelerator-type: L4}

They go to Ray as they are, in place of what Slipway would ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, field_validator

from slipway.errors import ConfigurationError
from slipway.files.yaml_files import LISTS, YamlError, load_document
from slipway.sizes import parse_size
from slipway.texts import MalformedText

VARIABLE = "SLIPWAY_RAY_OPTIONS"
DEFAULT = "default"


class StageOptions(BaseModel):
    """Options of one stage; see Ray's documentation of ``ray.remote``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_cpus: float | None = Field(default=None, gt=0)
    num_gpus: float | None = Field(default=None, ge=0)
    memory: int | None = Field(default=None, ge=0)
    resources: dict[str, float] | None = None
    label_selector: dict[str, str] | None = None
    runtime_env: dict[str, Any] | None = None

    @field_validator("memory", mode="before")
    @classmethod
    def _read_size(cls, value: Any) -> Any:
        try:
            return parse_size(value) if isinstance(value, str) else value
        except MalformedText as error:
            raise ValueError(str(error)) from error


class _File(RootModel[dict[str, StageOptions]]):
    """The whole file."""


def load_stage_options(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the options by stage; none if no file is named.

    Raises:
        ConfigurationError: ``CONFIGURATION_INVALID``.
    """
    name = environment.get(VARIABLE, "")
    if not name:
        return {}
    try:
        read = _File.model_validate(load_document(Path(name), limits=LISTS))
    except OSError as error:
        raise _error(name, error.strerror or "it cannot be read") from error
    except YamlError as error:
        raise _error(name, str(error)) from error
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))
        raise _error(name, "; ".join(problems)) from error
    return {stage: options.model_dump(exclude_none=True) for stage, options in read.root.items()}


def _error(name: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{VARIABLE} names {name}: {what}",
        remedy="docs/engines.md shows such a file",
        about={"key": VARIABLE, "file": name},
    )

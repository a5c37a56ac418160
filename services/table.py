"""The table of services, ``services/services.toml``: its rows, read and checked."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

TABLE = "services/services.toml"


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Text = Annotated[str, StringConstraints(pattern=r"^[^\n]*$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
Gibibytes = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*Gi$")]
Place = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_.]*:[A-Z_]+$")]
"""An object of a service's package: ``module:NAME``."""


class Worker(_Row):
    """How a service's workers run on Kubernetes.

    Attributes:
        about: What they do, and why they need what they need; the column ``for``.
        cpu: Processors.
        memory: Memory at most, as Kubernetes writes it.
        reserved: What of it is reserved, for models of 0.6 billion weights; empty for all.
        volume: Size of the volume for the scratch folder.
        scratch: What the cache of the bucket may use of it; empty for the default.
        replicas: How many run where nothing scales them.
        unserved: Stages of the service that no worker serves.
    """

    about: Text = Field(alias="for")
    cpu: int
    memory: Gibibytes
    reserved: Gibibytes | None = None
    volume: Gibibytes
    scratch: Text = ""
    replicas: Annotated[int, Field(ge=0)] = 0
    unserved: list[Name] = []

    @model_validator(mode="after")
    def _reserve_no_more_than_there_is(self) -> Self:
        if self.reserved and int(self.reserved.removesuffix("Gi")) > int(self.memory.removesuffix("Gi")):
            raise ValueError(f"reserved is {self.reserved}, more than memory: {self.memory}")
        return self


class Service(_Row):
    """A row of the table; its comment says what each column is."""

    name: Name
    does: Text
    runs_on: Text
    requires: list[Text]
    stages: dict[Name, Place] = {}
    formats: dict[Name, Place] = {}
    note: Text = ""
    brings: Text = ""
    cuda: list[Text] = []
    image: list[Text] = []
    worker: Worker | None = None

    @property
    def package(self) -> str:
        """Return the name of its package."""
        return f"slipway_{self.name}"

    @property
    def kebab(self) -> str:
        """Return its name with hyphens, as images and objects of Kubernetes are called."""
        return self.name.replace("_", "-")

    @property
    def served(self) -> str:
        """Return the stages that its workers serve."""
        unserved = self.worker.unserved if self.worker else ()
        return ",".join(stage for stage in self.stages if stage not in unserved)


def read_table(folder: Path) -> list[Service]:
    """Read the table below a folder.

    Raises:
        ValueError: A row is wrong; the message says which, and how.
    """
    try:
        rows = tomllib.loads((folder / TABLE).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{TABLE} is not TOML: {error}") from error
    services: list[Service] = []
    for name, row in rows.items():
        try:
            service = Service.model_validate({**row, "name": name} if isinstance(row, dict) else row)
        except ValidationError as error:
            first = error.errors()[0]
            column = ".".join(map(str, first["loc"]))
            raise ValueError(f"{TABLE}: [{name}] {column}: {first['msg']}") from error
        if fault := _find_fault(service, folder, services):
            raise ValueError(f"{TABLE}: [{name}] {fault}")
        services.append(service)
    return services


def _find_fault(service: Service, folder: Path, before: list[Service]) -> str:
    """Return what of a row does not fit the tree or the rows before it; empty if all does."""
    home = folder / "services" / service.name
    if not (home / service.package).is_dir():
        return f"has no package: make services/{service.name}/{service.package}/"
    if not (home / "README.md").is_file():
        return f"has no page: write services/{service.name}/README.md"
    for place in (*service.stages.values(), *service.formats.values()):
        module, _, name = place.partition(":")
        path = home / service.package / f"{module.replace('.', '/')}.py"
        if not path.is_file():
            return f"names {place}, and {service.package} has no module {module}"
        if not re.search(rf"^{name}\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            return f"names {place}, and its module has no {name}"
    for kind in ("stages", "formats"):
        taken = {name: other.name for other in before for name in getattr(other, kind)}
        if twice := next((name for name in getattr(service, kind) if name in taken), ""):
            return f"{kind}: [{taken[twice]}] has {twice} too"
    unknown = set(service.worker.unserved) - set(service.stages) if service.worker else ()
    return f"worker.unserved: {min(unknown)} is none of its stages" if unknown else ""

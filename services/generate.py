"""Write what files say of services and formats, from one table: ``services/services.toml``.

Usage: ``python services/generate.py [--check] [FOLDER]``. With ``--check`` nothing is written, and what is not current is an error.

What is written lies in files of its own, which say so in their first line, or between two lines of a file that do.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = "services/services.toml"
_MADE = f"made by services/generate.py from {TABLE}"
_WIDTH = 128
_REST = ("s3",)
"""Extras that every image has."""


@dataclass(frozen=True)
class Worker:
    """How a service's workers run on Kubernetes.

    Attributes:
        about: What they do, and why they need what they need.
        cpu: Processors.
        memory: Memory, as Kubernetes writes it.
        volume: Size of the volume for the scratch folder.
        scratch: What tasks may use of it; empty for the default.
        unserved: Stages of the service that no worker serves.
    """

    about: str
    cpu: int
    memory: str
    volume: str
    scratch: str = ""
    unserved: tuple[str, ...] = ()


@dataclass(frozen=True)
class Service:
    """A row of the table; its comment says what each column is."""

    name: str
    does: str
    runs_on: str
    requires: tuple[str, ...]
    stages: Mapping[str, str]
    formats: Mapping[str, str]
    note: str = ""
    brings: str = ""
    cuda: tuple[str, ...] = ()
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
    rows = tomllib.loads((folder / TABLE).read_text(encoding="utf-8"))
    return [_service(name, row, folder) for name, row in rows.items()]


def _service(name: str, row: dict[str, Any], folder: Path) -> Service:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(
            f"{TABLE}: {name!r} cannot be the name of a service: write it in small letters, digits and underscores"
        )
    if not (folder / "services" / name / f"slipway_{name}").is_dir():
        raise ValueError(f"{TABLE}: [{name}] has no package: make services/{name}/slipway_{name}/")
    given = dict(row)
    worker = given.pop("worker", None)
    try:
        made = Service(
            name=name,
            stages=given.pop("stages", {}),
            formats=given.pop("formats", {}),
            requires=tuple(given.pop("requires")),
            cuda=tuple(given.pop("cuda", ())),
            worker=_worker(worker) if worker else None,
            **given,
        )
    except (TypeError, KeyError) as error:
        raise ValueError(f"{TABLE}: [{name}] has a column too many or too few: {error}") from error
    for place in (*made.stages.values(), *made.formats.values()):
        module = place.partition(":")[0].replace(".", "/")
        if not (folder / "services" / name / made.package / f"{module}.py").is_file():
            raise ValueError(f"{TABLE}: [{name}] names {place}, and {made.package} has no module {module}.py")
    return made


def _worker(row: Mapping[str, Any]) -> Worker:
    given = dict(row)
    return Worker(about=given.pop("for"), unserved=tuple(given.pop("unserved", ())), **given)


def _quoted(values: Iterable[str]) -> str:
    return ", ".join(f'"{value}"' for value in values)


def _extras(services: list[Service]) -> str:
    """Return the extra of each service, and the one with all that every machine can have."""
    lines = []
    for service in services:
        lines += [f"# {service.note}"] if service.note else []
        lines.append(f"{service.name} = [{_quoted(service.requires)}]")
    everywhere = [service.name for service in services if not service.brings]
    lines.append(f'all = ["slipway-ml[{",".join(["worker", "report", *everywhere, "metrics", "sample", "s3"])}]"]')
    return "\n".join(lines)


def _entry_points(services: list[Service], kind: str) -> str:
    return "\n".join(
        f'{name} = "{service.package}.{place}"'
        for service in services
        for name, place in getattr(service, kind).items()
    )


def _packages(services: list[Service], *, first: str = "") -> str:
    return _quoted([*([first] if first else []), *(service.package for service in services)])


def _mypy(services: list[Service]) -> str:
    places = ":".join(["shared", "protos", *(f"services/{service.name}" for service in services)])
    return f'mypy_path = "{places}"\npackages = [{_packages(services, first="slipway")}]'


def _images(services: list[Service]) -> str:
    lines = ["declare -A IMAGES=("]
    lines += [f'    [{each.kebab}]="cpu {",".join([each.kebab, *_REST])}"' for each in services]
    lines += [
        f'    [{each.kebab}-cuda]="cuda {",".join([each.kebab, *each.cuda, *_REST])}"' for each in services if each.cuda
    ]
    return "\n".join([*lines, ")", f"ON_CPU=({' '.join(each.kebab for each in services)})"])


def _compose(services: list[Service]) -> str:
    return "\n".join(
        f"  worker-{each.kebab}:\n"
        "    <<: *worker\n"
        f"    image: slipway-{each.kebab}:${{SLIPWAY_VERSION:-0.1.0}}\n"
        f"    command: [slipway, worker, {_flag(each)}, --metrics=0.0.0.0:9464, --drain-seconds=100]"
        for each in _workers(services)
    )


def _flag(service: Service) -> str:
    return f'"--stage={service.served}"' if "," in service.served else f"--stage={service.served}"


def _workers(services: list[Service]) -> list[Service]:
    return [service for service in services if service.worker]


def _scrape(services: list[Service]) -> str:
    return f"      - names: [{', '.join(f'worker-{each.kebab}' for each in _workers(services))}]"


def _kustomization(service: Service, worker: Worker) -> str:
    container = "/spec/template/spec/containers/0"
    volume = "/spec/template/spec/volumes/1/ephemeral/volumeClaimTemplate/spec"
    values = {
        f"{container}/args/0": f'"--stage={service.served}"',
        f"{container}/resources/requests/cpu": f'"{worker.cpu}"',
        f"{container}/resources/requests/memory": worker.memory,
        f"{container}/resources/limits/memory": worker.memory,
        f"{volume}/resources/requests/storage": worker.volume,
        **({f"{container}/env/3/value": worker.scratch} if worker.scratch else {}),
    }
    operations = "\n".join(f"      - {{op: replace, path: {path}, value: {value}}}" for path, value in values.items())
    about = "\n".join(f"# {line}" for line in textwrap.wrap(worker.about, _WIDTH))
    return f"""\
# {_MADE[0].upper()}{_MADE[1:]}.
{about}
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
  - ../worker
nameSuffix: -{service.kebab}
labels:
  - pairs:
      slipway.dev/stage: {service.kebab}
    includeSelectors: true
images:
  - name: slipway-worker
    newName: slipway-{service.kebab}
patches:
  - target:
      kind: Deployment
    patch: |
{operations}
"""


def _scaled_objects(services: list[Service]) -> str:
    return "\n".join(
        f"""\
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: slipway-{each.kebab}
  labels:
    slipway.dev/stage: {each.kebab}
spec:
  scaleTargetRef:
    name: slipway-{each.kebab}
  minReplicaCount: 0
  maxReplicaCount: 4
  pollingInterval: 15
  cooldownPeriod: 300
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown:
          stabilizationWindowSeconds: 300
  triggers:
    # Pushed, so that the first worker starts when the first task is due, not at the next poll.
    - type: external-push
      metadata:
        scalerAddress: slipway-coordinator.slipway.svc:7070
        stage: {each.served}
        gpuArchitecture: none
      authenticationRef:
        name: slipway-scaler"""
        for each in _workers(services)
    )


def _readme_extras(services: list[Service]) -> str:
    everywhere = [each.name for each in services if not each.brings and each.worker]
    first, *others = everywhere
    names = ", ".join([f"`'slipway-ml[{first}]'`", *(f"`[{name}]`" for name in others)])
    rows = [f"| {names} | the stages of one service, with the worker that runs them |"]
    rows += [f"| `'slipway-ml[{each.name}]'` | {each.brings} |" for each in services if each.brings]
    return "\n".join(["| `pip install` | brings |", "|---|---|", *rows])


def _readme_services(services: list[Service]) -> str:
    rows = [f"| [{each.name}](services/{each.name}/README.md) | {each.does} | {each.runs_on} |" for each in services]
    return "\n".join(["| service | does | runs on |", "|---|---|---|", *rows])


@dataclass(frozen=True)
class Block:
    """A part of a file between two lines.

    Attributes:
        file: Path below the root.
        name: Its name in these lines.
        write: Makes it of the table.
    """

    file: str
    name: str
    write: Callable[[list[Service]], str]

    def put_into(self, text: str, services: list[Service]) -> str:
        """Return a file's text with the block as it should be.

        Raises:
            ValueError: The file has no place for it.
        """
        html = self.file.endswith(".md")
        begin = f"<!-- begin {self.name}: {_MADE} -->" if html else f"# begin {self.name}: {_MADE}"
        end = f"<!-- end {self.name} -->" if html else f"# end {self.name}"
        pattern = re.compile(rf"^( *){re.escape(begin)}\n.*?^ *{re.escape(end)}$", re.DOTALL | re.MULTILINE)
        if not pattern.search(text):
            raise ValueError(f"{self.file} has no place for {self.name}: write the lines {begin!r} and {end!r}")
        gap = "\n" if html else ""
        return pattern.sub(
            lambda found: f"{found[1]}{begin}\n{gap}{self.write(services)}\n{gap}{found[1]}{end}", text, count=1
        )


BLOCKS = (
    Block("pyproject.toml", "extras", _extras),
    Block("pyproject.toml", "stages", lambda services: _entry_points(services, "stages")),
    Block("pyproject.toml", "formats", lambda services: _entry_points(services, "formats")),
    Block("pyproject.toml", "places", lambda services: "\n".join(f'    "services/{each.name}",' for each in services)),
    Block("pyproject.toml", "types", _mypy),
    Block("pyproject.toml", "roots", lambda services: f"root_packages = [{_packages(services, first='slipway')}]"),
    Block("pyproject.toml", "circles", lambda services: f"ancestors = [{_packages(services, first='slipway')}]"),
    Block("pyproject.toml", "independence", lambda services: f"modules = [{_packages(services)}]"),
    Block("pyproject.toml", "direction", lambda services: f"forbidden_modules = [{_packages(services)}]"),
    Block("deploy/build.sh", "images", _images),
    Block("deploy/compose.yaml", "workers", _compose),
    Block("deploy/prometheus/prometheus.yaml", "workers", _scrape),
    Block("k8s/base/kustomization.yaml", "workers", lambda all_: "\n".join(f"  - {each.kebab}" for each in _workers(all_))),
    Block("k8s/components/keda/scaled-objects.yaml", "workers", _scaled_objects),
    Block("README.md", "extras", _readme_extras),
    Block("README.md", "services", _readme_services),
    Block("docs/site/mkdocs.yml", "services", lambda all_: "\n".join(f"      - services/{each.name}/README.md" for each in all_)),
)  # fmt: skip


def made(folder: Path) -> dict[Path, str]:
    """Return what each file should say.

    Raises:
        ValueError: A row of the table is wrong, or a file has no place for a block.
    """
    services = read_table(folder)
    texts: dict[Path, str] = {}
    for block in BLOCKS:
        path = folder / block.file
        texts[path] = block.put_into(texts.get(path) or path.read_text(encoding="utf-8"), services)
    for service in services:
        if service.worker:
            texts[folder / "k8s" / "base" / service.kebab / "kustomization.yaml"] = _kustomization(
                service, service.worker
            )
    return texts


def main() -> int:
    """Write the files, or say which are not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    try:
        texts = made(given.folder)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if given.check:
            print(f"{path.relative_to(given.folder)} is not current: run python services/generate.py", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""Write what files say of services and formats, from one table: ``services/services.toml``.

Usage: ``python services/generate.py [--check] [FOLDER]``. With ``--check`` nothing is written, and what is not current is an error.

What is written lies in files of its own, which say so in their first line, or between two lines of a file that do.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

# Python leaves the script's own folder out with -P.
sys.path.insert(0, str(Path(__file__).parent))
from table import TABLE, Service, read_table

_MADE = f"made by services/generate.py from {TABLE}"
_TITLE = f"# {_MADE[0].upper()}{_MADE[1:]}."
_WIDTH = 128
_VERSION = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "version"
]
_REST = ("s3",)
"""Extras that every image has."""
_CACHE = "32GiB"
"""Cache of the bucket that ``k8s/base/worker`` has."""


def _quoted(values: Iterable[str]) -> str:
    return ", ".join(json.dumps(value, ensure_ascii=False) for value in values)


def _extras(services: list[Service]) -> str:
    """Return the extra of each service, and the one with all that every machine can have."""
    lines = []
    for service in services:
        lines += [f"# {service.note}"] if service.note else []
        lines.append(f"{service.name} = [{_quoted(service.requires)}]")
    everywhere = [service.name for service in services if not service.brings]
    lines.append(
        f'all = ["slipway-ml[{",".join(["worker", "report", "ui", *everywhere, "metrics", "sample", "s3"])}]"]'
    )
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
    lines += [f'    [{each.kebab}]="cpu {",".join([each.kebab, *each.image, *_REST])}"' for each in services]
    lines += [
        f'    [{each.kebab}-cuda]="cuda {",".join([each.kebab, *each.cuda, *each.image, *_REST])}"'
        for each in services
        if each.cuda
    ]
    return "\n".join([*lines, ")", f"ON_CPU=({' '.join(each.kebab for each in services)})"])


def _compose(services: list[Service]) -> str:
    return "\n".join(
        f"  worker-{each.kebab}:\n"
        "    <<: *worker\n"
        f"    image: slipway-{each.kebab}:${{SLIPWAY_VERSION:-{_VERSION}}}\n"
        f"    command: [slipway, worker, {_flag(each)}, --metrics=0.0.0.0:9464, --drain-seconds=100]"
        for each in _workers(services)
    )


def _flag(service: Service) -> str:
    return f'"--stage={service.served}"' if "," in service.served else f"--stage={service.served}"


def _workers(services: list[Service]) -> list[Service]:
    return [service for service in services if service.worker]


def _scrape(services: list[Service]) -> str:
    return f"      - names: [{', '.join(f'worker-{each.kebab}' for each in _workers(services))}]"


def _kustomization(service: Service) -> str:
    worker = service.worker
    assert worker
    container = "/spec/template/spec/containers/0"
    volume = "/spec/template/spec/volumes/1/ephemeral/volumeClaimTemplate/spec"
    values = {
        f"{container}/args/0": f'"--stage={service.served}"',
        f"{container}/resources/requests/cpu": f'"{worker.cpu}"',
        f"{container}/resources/requests/memory": worker.reserved or worker.memory,
        f"{container}/resources/limits/memory": worker.memory,
        f"{volume}/resources/requests/storage": worker.volume,
        **({f"{container}/env/3/value": worker.scratch} if worker.scratch else {}),
    }
    operations = "\n".join(f"      - {{op: replace, path: {path}, value: {value}}}" for path, value in values.items())
    about = "\n".join(f"# {line}" for line in textwrap.wrap(worker.about, _WIDTH))
    return f"""\
{_TITLE}
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


def _chart_workers(services: list[Service]) -> str:
    """Return what the templates of the Helm chart know of each worker."""
    texts = [f"{_TITLE}\n# The templates range over it; what of it may be changed is in values.yaml."]
    for each in _workers(services):
        worker = each.worker
        assert worker
        texts.append(
            f"{each.kebab}:\n"
            f"  stages: {each.served}\n"
            f"  cuda: {json.dumps(bool(each.cuda))}\n"
            f"  replicas: {worker.replicas}\n"
            f"  cpu: {json.dumps(str(worker.cpu))}\n"
            f"  reserved: {worker.reserved or worker.memory}\n"
            f"  memory: {worker.memory}\n"
            f"  volume: {worker.volume}\n"
            f"  cache: {worker.scratch or _CACHE}"
        )
    return "\n".join(texts) + "\n"


def _chart_readme(services: list[Service]) -> str:
    """Return the workers of the Helm chart as a table, and what those that run without KEDA ask for together."""
    rows = ["| worker | stages | replicas without KEDA | processors | memory reserved | at most | volume |"]
    rows.append("|---|---|---|---|---|---|---|")
    cpu = reserved = memory = volume = 0
    for each in _workers(services):
        worker = each.worker
        assert worker
        stages = each.served.replace(",", ", ")
        sizes = (worker.reserved or worker.memory, worker.memory, worker.volume)
        rows.append(f"| `{each.kebab}` | {stages} | {worker.replicas} | {worker.cpu} | {' | '.join(sizes)} |")
        cpu += worker.replicas * worker.cpu
        reserved, memory, volume = (
            total + worker.replicas * int(size.removesuffix("Gi"))
            for total, size in zip((reserved, memory, volume), sizes, strict=True)
        )
    rows.append(f"| **together, without KEDA** | | | {cpu} | {reserved}Gi | {memory}Gi | {volume}Gi |")
    return "\n".join(rows)


def _extras_table(services: list[Service]) -> str:
    everywhere = [each.name for each in services if not each.brings and each.worker]
    first, *others = everywhere
    names = ", ".join([f"`'slipway-ml[{first}]'`", *(f"`[{name}]`" for name in others)])
    rows = [f"| {names} | the stages of one service, with the worker that runs them |"]
    rows += [f"| `'slipway-ml[{each.name}]'` | {each.brings} |" for each in services if each.brings]
    table = "\n".join(["| `pip install` | brings |", "|---|---|", *rows])
    return table.replace("](services/", "](../services/")  # the table's links begin at the root


def _services_table(services: list[Service]) -> str:
    rows = [f"| [{each.name}](../services/{each.name}/README.md) | {each.does} | {each.runs_on} |" for each in services]
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
    Block("k8s/helm/slipway/README.md", "workers", _chart_readme),
    Block("docs/installing.md", "extras", _extras_table),
    Block("docs/architecture.md", "services", _services_table),
    Block("docs/site/mkdocs.yml", "services", lambda all_: "\n".join(f"      - services/{each.name}/README.md" for each in all_)),
)  # fmt: skip


def made(folder: Path) -> dict[Path, str]:
    """Return what each file should say; nothing for one that should not be there.

    Raises:
        ValueError: A row of the table is wrong, or a file has no place for a block.
    """
    services = read_table(folder)
    base = folder / "k8s" / "base"
    texts = {path: "" for path in base.glob("*/kustomization.yaml") if _TITLE in path.read_text(encoding="utf-8")}
    for service in _workers(services):
        texts[base / service.kebab / "kustomization.yaml"] = _kustomization(service)
    texts[folder / "k8s" / "helm" / "slipway" / "files" / "workers.yaml"] = _chart_workers(services)
    for block in BLOCKS:
        path = folder / block.file
        texts[path] = block.put_into(texts.get(path) or path.read_text(encoding="utf-8"), services)
    tomllib.loads(texts[folder / "pyproject.toml"])
    return texts


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text if text else not path.exists()


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
    stale = [path for path, text in texts.items() if not _is_current(path, text)]
    for path in stale:
        if given.check:
            print(f"{path.relative_to(given.folder)} is not current: run python services/generate.py", file=sys.stderr)
        elif texts[path]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
        else:
            shutil.rmtree(path.parent)
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

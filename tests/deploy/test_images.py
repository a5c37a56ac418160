"""Dockerfiles, the compose file and the scripts around them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from slipway.observability import metrics
from slipway.registry import load_stage, plays, stage_names
from slipway.service_flags import worker_parser
from slipway.stage import Role
from slipway_coordinator.service import coordinator_parser
from support.manifests.overlay import understood

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("slipway-")}
PIN = "(@sha256:[0-9a-f]{64})?"  # deploy/pin_images.py writes it
HADOLINT = Path(sys.executable).with_name("hadolint")


def images() -> dict[str, tuple[str, set[str]]]:
    """Dockerfile and extras of each image, as the build script has them."""
    script = (DEPLOY / "build.sh").read_text()
    found = re.findall(r'^    \[([a-z-]+)\]="(\w+) ([a-z0-9_,-]*)"$', script, re.MULTILINE)
    named = {name: (dockerfile, set(filter(None, extras.split(",")))) for name, dockerfile, extras in found}
    assert not any("_" in extra for _, extras in named.values() for extra in extras), "older pip ignores these silently"
    return {
        name: (dockerfile, {extra.replace("-", "_") for extra in extras})
        for name, (dockerfile, extras) in named.items()
    }


def service_of_stages() -> dict[str, str]:
    """Whose code each stage is; a service may have several."""
    found = PROJECT["entry-points"]["slipway.stages"]
    return {name: target.split(".")[0].removeprefix("slipway_") for name, target in found.items()}


def test_there_are_dockerfiles() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = subprocess.run([HADOLINT, "--failure-threshold", "style", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_not_root_and_have_fixed_bases(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001:10001"]
    (base,) = [line.partition("=")[2] for line in lines if line.startswith("ARG BASE=")]
    assert re.fullmatch(rf"[a-z/]+:\d[\w.-]+{PIN}", base), base


def test_every_stage_has_an_image_with_its_extra_alone() -> None:
    extras = set(PROJECT["optional-dependencies"])
    services = set(service_of_stages().values())
    for name, (dockerfile, wanted) in images().items():
        service = name.removesuffix("-cuda").replace("-", "_")
        assert wanted <= extras
        assert wanted & services == ({service} if service != "coordinator" else set())
        assert (dockerfile == "cuda") == name.endswith("-cuda")
    assert {name.replace("-", "_") for name in images()} >= services | {"coordinator"}


@pytest.mark.parametrize("stage", sorted(service_of_stages()))
def test_the_extra_of_a_service_holds_the_libraries_of_its_stages(stage: str) -> None:
    """An environment with everything in it never shows that one is missing."""
    lines = PROJECT["optional-dependencies"][service_of_stages()[stage]]
    held = {re.split(r"[<>=!~ \[;]", line)[0].replace("_", "-").lower() for line in lines}
    for_gpus = {"tensorrt", "tensorrt-rtx"}  # used where they are, and brought by the image for GPUs
    assert {name.replace("_", "-").lower() for name in load_stage(stage).libraries} - for_gpus <= held


def test_images_of_the_compose_file_are_built_or_have_a_version() -> None:
    for name, service in SERVICES.items():
        image, _, tag = service["image"].partition(":")
        tag = re.sub(rf"{PIN}$", "", tag)
        if name in OURS:
            assert image.removeprefix("slipway-") in images()
            assert tag == f"${{SLIPWAY_VERSION:-{PROJECT['version']}}}"
        else:
            assert re.search(r"\d+\.\d+|\d{4}-\d\d-\d\d", tag), f"{name} has no fixed version: {tag}"
        assert image.count("/") <= 1
        assert "." not in image


def test_the_compose_file_follows_its_specification() -> None:
    ours = {name: part for name, part in COMPOSE.items() if not name.startswith("x-")}
    text = re.sub(r"\$\{[^}]*\}", "given", yaml.safe_dump(ours))  # variables are put in before it is read
    assert sorted(PyCompose.from_yaml(text).to_spec().services or {}) == sorted(SERVICES)
    with pytest.raises(ValueError, match="helthcheck"):
        PyCompose.from_yaml(text.replace("healthcheck:", "helthcheck:"))


def test_references_of_the_compose_file_exist() -> None:
    named = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", ())}
    for volume in named:
        if volume.startswith("./"):
            assert (DEPLOY / volume).exists(), volume
        else:
            assert volume in COMPOSE["volumes"]
    assert set(COMPOSE["volumes"]) <= named
    for service in SERVICES.values():
        assert set(service.get("depends_on", ())) <= set(SERVICES)
    for host in re.findall(r"(?://|@)([a-z][a-z-]+):\d", (DEPLOY / "compose.yaml").read_text()):
        assert host in SERVICES, host


def test_ports_are_published_on_loopback_alone() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) >= 5
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_our_containers_are_confined_and_their_commands_are_understood() -> None:
    stages = set()
    for name, service in OURS.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"]
        assert service["command"][0] == "slipway"
        arguments = service["command"][2:]
        if service["command"][1] == "worker":
            own = worker_parser("slipway worker").parse_args(arguments).stage.split(",")
            image = service["image"].partition(":")[0].removeprefix("slipway-").replace("-", "_")
            assert {service_of_stages()[stage] for stage in own} == {image}
            stages.update(own)
        else:
            coordinator_parser("slipway coordinator").parse_args([*arguments, "--state=x"])
        secrets = {key: value for key, value in service["environment"].items() if re.search("PASSWORD|SECRET", key)}
        assert secrets
        assert all(str(value).startswith("${") for value in secrets.values()), "a secret is written down"
    assert stages == {
        name for name in stage_names() if not plays(name, Role.CONVERSION, Role.ANSWERING)
    }  # no export plans them


def test_the_documented_cleanup_is_a_command_of_a_service() -> None:
    """The line for a crontab: compose runs it in a container that has the store, and it asks the coordinators' one address."""
    text = (ROOT / "docs" / "operations.md").read_text()
    (line,) = re.findall(r"^[\d* ]+ /opt/slipway/(deploy/up\.sh run .*)$", text, re.MULTILINE)
    script, run, *words = shlex.split(line)
    assert (ROOT / script).is_file()
    *flags, service, command = words[: words.index("slipway") + 1]
    assert (run, command, flags) == ("run", "slipway", ["-T", "--rm", "--no-deps"])
    assert OURS[service]["environment"]["SLIPWAY_STORE"].startswith("s3://")
    given = understood(words[len(flags) + 2 :])
    assert (given.command, given.older_than, given.dry_run) == ("cache gc", "30d", False)
    host, _, port = given.coordinator.partition(":")
    assert f"bind :{port}" in (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
    assert any("haproxy.cfg" in volume for volume in SERVICES[host]["volumes"])


def test_haproxy_matches_the_value_of_the_active_coordinator_alone() -> None:
    config = (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
    (pattern,) = re.findall(r"http-check expect rstring '(.*)'", config)
    for active in (True, False):
        read = partial(lambda value: [(metrics.ACTIVE, {}, value)], float(active))
        with metrics.serving("127.0.0.1:0") as port, metrics.reading(read):
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        assert "# HELP slipway_coordinator_active" in text
        assert bool(re.search(pattern, text)) is active


def test_prometheus_and_the_collector_look_where_the_parts_are() -> None:
    prometheus = (DEPLOY / "prometheus" / "prometheus.yaml").read_text()
    jobs = yaml.safe_load(prometheus)["scrape_configs"]
    static = {target for job in jobs for config in job.get("static_configs", ()) for target in config["targets"]}
    names = {name for job in jobs for config in job.get("dns_sd_configs", ()) for name in config["names"]}
    assert {target.split(":")[0] for target in static} | names == set(OURS) - {"migrate"}
    collector = yaml.safe_load((DEPLOY / "collector" / "config.yaml").read_text())
    pipeline = collector["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == set(collector[kind])
    assert collector["exporters"]["otlp/jaeger"]["endpoint"].split(":")[0] in SERVICES


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_itself_takes_its_configuration() -> None:
    command = ["promtool", "check", "config", str(DEPLOY / "prometheus" / "prometheus.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_scripts_say_what_they_need(tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "sed", "env"):
        found = shutil.which(tool)
        assert found
        (tmp_path / tool).symlink_to(found)
    environment = {"PATH": str(tmp_path)}
    build = subprocess.run([DEPLOY / "build.sh"], env=environment, capture_output=True, text=True)
    assert build.returncode == 7
    assert "docker" in build.stderr
    assert "buildah" in build.stderr
    test = subprocess.run([DEPLOY / "test-images.sh"], env=environment, capture_output=True, text=True)
    assert (test.returncode, test.stdout.split(":")[0]) == (0, "skipped")


def test_an_unknown_image_is_named() -> None:
    environment = {"PATH": "/usr/bin:/bin", "BUILDER": "true"}
    done = subprocess.run([DEPLOY / "build.sh", "nothing"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "onnx-export" in done.stderr


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Address of a server that takes calls and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def images_skipped(*prefix: str, **more: str) -> str:
    """What the test of the images says where it cannot work, which is no failure and takes less than a minute."""
    environment = {**os.environ, **more}
    command = [*prefix, DEPLOY / "test-images.sh", "coordinator"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    said, _, why = done.stdout.strip().partition(": ")
    assert said == "skipped", done.stdout
    return why


needs_buildah = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("buildah", "debootstrap", "unshare", "setpriv", "wget"))),
    reason="images can only be built by root with buildah and debootstrap",
)


@needs_buildah
@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        (("setpriv", "--reuid=10001", "--clear-groups"), "needs root"),
        (("setpriv", "--bounding-set=-sys_admin"), "does not let its root mount"),
    ],
    ids=["no root", "no mounts"],
)
def test_images_are_not_tested_where_they_cannot_be_built(tmp_path: Path, prefix: tuple[str, ...], said: str) -> None:
    assert said in images_skipped(*prefix, TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@needs_buildah
@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "said"),
    [("PIP_INDEX_URL", "Python's packages"), ("MIRROR", "Debian's packages")],
    ids=["pip", "debian"],
)
def test_images_are_not_tested_where_packages_do_not_come(
    tmp_path: Path, silent_server: str, setting: str, said: str
) -> None:
    why = images_skipped(**{setting: f"http://{silent_server}", "TMPDIR": str(tmp_path)})
    if setting == "MIRROR" and why.startswith("Python's packages"):  # it asks for those first
        pytest.skip(why)
    assert why.startswith(said)
    assert silent_server in why or "typing-extensions" in why
    assert list(tmp_path.iterdir()) == []

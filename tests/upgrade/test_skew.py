"""Coordinators, workers and clients of two versions together: an export runs to its end, or what is unsupported says so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.rpc.call_ends import failure_of_call
from slipway_protos.v1 import export_pb2 as pb
from slipway_protos.v1.configuration_pb2 import ExportConfiguration
from slipway_protos.v1.export_pb2_grpc import ExportServiceStub
from support.coordinators.harness import process, wait_for
from support.models import tiny_models
from support.servers.free_ports import free_port
from support.upgrades.real_exports import STAGES, export
from support.upgrades.site import Site
from support.upgrades.versions import THIS, Version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PAIRS = [each for each in itertools.product(("this", "previous"), repeat=3) if len(set(each)) == 2]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


def named(name: str, previous: Version) -> Version:
    return THIS if name == "this" else previous


@contextmanager
def running(folder: Path, coordinator: Version, workers: dict[Version, str]) -> Iterator[str]:
    """Run a coordinator, and workers with the stages of each; yield its address."""
    address, store = f"127.0.0.1:{free_port()}", {"SLIPWAY_STORE": str(folder / "store")}
    with ExitStack() as stack:
        words = [coordinator.command, "coordinator", "--listen", address, "--state", str(folder / "state.db")]
        environment = coordinator.environment(folder / "coordinator", **store)
        stack.enter_context(process(words, folder / "coordinator.log", **environment))
        client = stack.enter_context(Client(address))
        wait_for(lambda: _answers(client), seconds=120)
        for version, stages in workers.items():
            words = [version.command, "worker", "--coordinator", address, "--slots", "1", "--drain-seconds", "0"]
            environment = version.environment(folder / f"worker-{version.name}", **store)
            log = folder / f"worker-{version.name}.log"
            stack.enter_context(process([*words, "--stage", stages], log, **environment))
        yield address


def _answers(client: Client) -> bool:
    try:
        return list(client.list_exports(page_size=1)) == []
    except ModelExportError:
        return False


@pytest.mark.parametrize(("coordinator", "worker", "client"), PAIRS, ids=["-".join(each) for each in PAIRS])
def test_an_export_runs_to_its_end(
    previous: Version, project: Path, tmp_path: Path, coordinator: str, worker: str, client: str
) -> None:
    """With sources that the client sends, real stages, and a delivery that the client verifies; and the client lists it."""
    caller, home = named(client, previous), tmp_path / "client"
    with running(tmp_path, named(coordinator, previous), {named(worker, previous): STAGES}) as address:
        made = export(caller, project, tmp_path / "out", "--coordinator", address, home=home, level="none")
        assert caller.run("verify", str(made.folder), home=home).code == 0
        at = ("--coordinator", address, "--json")
        listed = caller.run("list", *at, home=home)
        assert listed.code == 0, listed.err
        assert [each["name"].rpartition("/")[2] for each in listed.json["exports"]] == [made.export]
        shown = caller.run("get", made.export, *at, home=home)
        assert shown.json["outputs"].keys() >= made.digests.keys()
        assert caller.run("watch", made.export, *at, home=home).code in {0, 4}
        deleted = caller.run("delete", made.export, *at, home=home)
        assert deleted.code == 0, deleted.err


@pytest.mark.parametrize("later", ["this", "previous"])
def test_a_stage_takes_what_one_of_the_other_version_made(
    previous: Version, project: Path, tmp_path: Path, later: str
) -> None:
    """The first stages by workers of one version, the later ones by those of the other."""
    judge = named(later, previous)
    maker = previous if judge is THIS else THIS
    with running(tmp_path, THIS, {maker: "prepare,merge,reference", judge: "quantize,validate"}) as address:
        made = export(THIS, project, tmp_path / "out", "--coordinator", address, home=tmp_path / "client")
        assert made.result["validation_passed"] is not None
        with Client(address) as client:
            tasks = client.get_export(made.export).tasks
    assert {"merge", "reference", "quantize", "validate"} <= {task.stage for task in tasks}
    assert all(task.state == pb.TASK_STATE_SUCCEEDED for task in tasks)


def field(message: Any, path: str) -> None:
    """Set the field of a message at a path to a value that no default has."""
    first, _, rest = path.partition(".")
    if rest:
        field(getattr(message, first), rest)
        return
    descriptor = message.DESCRIPTOR.fields_by_name[first]
    value: Any = "x" if descriptor.cpp_type == descriptor.CPPTYPE_STRING else 1
    if descriptor.is_repeated:
        getattr(message, first).append(value)
    else:
        setattr(message, first, value)


@pytest.fixture
def older(previous: Version, tmp_path: Path) -> Iterator[Site]:
    """A coordinator of the earlier version without workers."""
    site = Site(tmp_path, str(tmp_path / "state.db"))
    with site.coordinator(previous):
        yield site


def test_a_newer_setting_is_refused_by_an_older_coordinator(previous: Version, older: Site) -> None:
    new = sorted(set(THIS.facts["settings"]) - set(previous.facts["settings"]))
    if not new:
        pytest.skip("the earlier version has all settings")
    sources = older.sources()
    for path in new:
        configuration = ExportConfiguration()
        field(configuration, path)
        request = pb.CreateExportRequest(parent="projects/default", configuration=configuration, sources=sources)
        with grpc.insecure_channel(older.address) as channel, pytest.raises(grpc.RpcError) as caught:
            ExportServiceStub(channel).CreateExport(request, timeout=60)
        failure = failure_of_call(caught.value, address=older.address)
        assert failure.reason == "REQUEST_INVALID", (path, failure)
    with Client(older.address) as client:
        assert list(client.list_exports()) == [], "nothing was created"


def test_a_newer_call_is_refused_by_an_older_coordinator(previous: Version, older: Site) -> None:
    new = sorted(set(THIS.facts["calls"]) - set(previous.facts["calls"]))
    if not new:
        pytest.skip("the earlier version has all calls")
    for path in new:
        with grpc.insecure_channel(older.address) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)(b"", timeout=60)
        failure = failure_of_call(caught.value, address=older.address)
        assert failure.reason == "CALL_NOT_FOUND", (path, failure)
        assert "older" in failure.message


def test_a_command_that_an_older_coordinator_does_not_know_says_so(previous: Version, older: Site) -> None:
    if "/slipway.v1.CoordinatorService/ListWorkers" in previous.facts["calls"]:
        pytest.skip("the earlier version has all calls of commands")
    for command in ("workers", "formats"):
        done = THIS.run(command, "--coordinator", older.address, home=older.home)
        assert done.code == 3, done.err
        assert "CALL_NOT_FOUND" in done.err
        assert "Traceback" not in done.err

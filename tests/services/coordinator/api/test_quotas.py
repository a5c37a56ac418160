"""Quotas of projects: what exceeds one is refused by its name, its value and its limit, and other projects go on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.security.access.access_file import AccessFile, load_access
from slipway.security.access.principals import new_token, token_hash
from slipway.security.access.projects import MOST_LABELS, ProjectLimits, Projects
from slipway.security.server import ServerSecurity
from slipway.settings.security import Security
from support.coordinators.harness import CONFIGURATION, DIGEST, Harness, state, wait_for

SOURCES = {"base": DIGEST, "adapter": DIGEST}
TOKEN = new_token()


class Place(Harness):
    """A coordinator whose access file has quotas."""

    def __init__(self, home: Path, **projects: dict[str, int]) -> None:
        self.access = home / "access.yaml"
        self.write(**projects)
        (home / "token").write_text(TOKEN)
        super().__init__(home, with_worker=False, security=ServerSecurity(authenticator=AccessFile(self.access)))

    def write(self, **projects: dict[str, int]) -> None:
        principal = {"name": "ci", "role": "operator", "projects": ["*"], "token_sha256": token_hash(TOKEN)}
        named = {("*" if name == "others" else name): limits for name, limits in projects.items()}
        self.access.write_text(yaml.safe_dump({"principals": [principal], "projects": named}))

    def of(self, project: str) -> Client:
        self.give(DIGEST, project=project)
        return Client(self.address, security=Security(token_file=self.home / "token"), project=project)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path, others={"unended_exports": 2, "highest_priority": 10}, red={"unended_exports": 3})
    with place:
        yield place


def refusal(client: Client, **request: Any) -> ModelExportError:
    with pytest.raises(ModelExportError) as caught:
        client.create_export(CONFIGURATION, sources=SOURCES, **request)
    assert (caught.value.reason, caught.value.failure().exit_code) == ("QUOTA_EXCEEDED", 5)
    return caught.value


def quota(error: ModelExportError) -> dict[str, str]:
    return {name: error.about[name] for name in ("project", "quota", "value", "limit")}


def test_a_project_has_as_many_exports_as_it_may(place: Place) -> None:
    with place.of("blue") as blue, place.of("red") as red:
        for number in range(2):
            blue.create_export(CONFIGURATION, sources=SOURCES, export_id=f"e{number}")
        refused = refusal(blue, export_id="e2")
        assert quota(refused) == {"project": "blue", "quota": "unended_exports", "value": "3", "limit": "2"}
        assert "cancel some" in str(refused)
        again = blue.create_export(CONFIGURATION, sources=SOURCES, export_id="e1")  # made before: no other one
        assert again.name == "projects/blue/exports/e1"
        for number in range(3):
            red.create_export(CONFIGURATION, sources=SOURCES, export_id=f"e{number}")
        blue.cancel_export("e0")
        wait_for(lambda: state(blue.get_export("e0")) == "cancelled")
        blue.create_export(CONFIGURATION, sources=SOURCES, export_id="e2")
        with pytest.raises(ModelExportError) as caught:
            blue.retry_export("e0")
        assert caught.value.reason == "QUOTA_EXCEEDED"
        place.write(others={"unended_exports": 3})
        assert state(blue.retry_export("e0")) in {"queued", "running"}


def test_calls_at_the_same_time_do_not_exceed_a_quota_together(place: Place) -> None:
    def create(number: int) -> str:
        with place.of("blue") as client:
            try:
                client.create_export(CONFIGURATION, sources=SOURCES, export_id=f"at-once-{number}")
            except ModelExportError as error:
                return error.reason
            return "made"

    with ThreadPoolExecutor(8) as callers:
        made = list(callers.map(create, range(8)))
    assert sorted(made) == [*["QUOTA_EXCEEDED"] * 6, "made", "made"]


def test_a_priority_above_the_projects_is_refused(place: Place) -> None:
    with place.of("red") as red:
        for only_checked in (False, True):
            refused = refusal(red, priority=11, validate_only=only_checked)
            assert quota(refused) == {"project": "red", "quota": "highest_priority", "value": "11", "limit": "10"}
            assert "give 10 or less" in str(refused)
        assert red.create_export(CONFIGURATION, sources=SOURCES, priority=10, export_id="high").priority == 10


def test_what_a_project_leaves_out_is_as_for_others() -> None:
    others = ProjectLimits(weight=2, unended_exports=5)
    projects = Projects({"*": others, "red": ProjectLimits(weight=3), "blue": ProjectLimits(unended_exports=0)})
    assert projects.limits("red") == ProjectLimits(weight=3, unended_exports=5)
    assert projects.limits("blue") == ProjectLimits(weight=2, unended_exports=0)
    assert projects.limits("green") == others
    assert Projects().limits("any") == ProjectLimits()


def test_bytes_are_a_number_or_a_size(tmp_path: Path) -> None:
    path = tmp_path / "access.yaml"
    principal = {"name": "ci", "role": "viewer", "projects": ["*"], "token_sha256": token_hash(TOKEN)}
    sizes = {"a": 5, "b": "2TB", "c": "1.5 GiB", "d": "0", "e": None}
    limits = {name: {"stored_bytes": size} for name, size in sizes.items()}
    path.write_text(yaml.safe_dump({"principals": [principal], "projects": limits}))
    read = load_access(path).projects
    assert [one.stored_bytes for one in read.values()] == [5, 2 * 10**12, 3 << 29, 0, None]


def test_few_projects_have_a_name_in_metrics() -> None:
    projects = Projects({"*": ProjectLimits()} | {f"p{number}": ProjectLimits() for number in range(500)})
    labels = {projects.label(f"p{number}") for number in range(1000)}
    assert len(labels) == MOST_LABELS + 1
    assert {projects.label("p0"), projects.label("p999"), projects.label("*")} == {"p0", "other"}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"red": {"weight": 0}}, "weight"),
        ({"red": {"weight": 1.5}}, "weight"),
        ({"red": {"unended_exports": -1}}, "unended_exports"),
        ({"red": {"highest_priority": 101}}, "highest_priority"),
        ({"red": {"gpus": 1}}, "gpus"),
        ({"red": {"gpu_seconds": -1}}, "gpu_seconds"),
        ({"red": {"gpu_seconds": "2h"}}, "gpu_seconds"),
        ({"red": {"gpu_seconds": 2**63}}, "gpu_seconds"),
        ({"red": {"stored_bytes": -1}}, "stored_bytes"),
        ({"red": {"stored_bytes": "much"}}, "this is not a size: write it like 8GiB"),
        ({"red": {"stored_bytes": "9999999999TB"}}, "stored_bytes"),
        ({"red": {"stored_bytes": [1]}}, "stored_bytes"),
        ({"red": {"stored_bytes": True}}, "stored_bytes"),
        ({"red": {"stored_bytes": 1.0}}, "stored_bytes"),
        ({"red": {"stored_bytes": "0.5"}}, "this is less than one byte: write 0 for none"),
        ({"red": {"gpu_seconds": True}}, "gpu_seconds"),
        ({"red": {"gpu_seconds": "5"}}, "gpu_seconds"),
        ({"Red/..": {}}, "not the name of a project"),
        ({"red": 3}, "red"),
        (["red"], "projects"),
    ],
)
def test_impossible_limits_are_refused(tmp_path: Path, limits: Any, message: str) -> None:
    path = tmp_path / "access.yaml"
    principal = {"name": "ci", "role": "viewer", "projects": ["*"], "token_sha256": token_hash(TOKEN)}
    path.write_text(yaml.safe_dump({"principals": [principal], "projects": limits}))
    with pytest.raises(ModelExportError, match=message) as caught:
        load_access(path)
    assert caught.value.reason == "ACCESS_INVALID"

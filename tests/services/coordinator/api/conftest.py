"""A coordinator for attackers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.coordinators.artifact_places import Place
from support.coordinators.attacker import PEOPLE_HERE, SECRET, Attacker


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Place(tmp_path_factory.mktemp("hostile-calls"), people=PEOPLE_HERE) as place:
        yield place


@pytest.fixture(scope="module")
def running_attacker(attacked: Place) -> Iterator[Attacker]:
    attacker = Attacker(attacked)
    yield attacker
    attacker.close()


@pytest.fixture
def attacker(running_attacker: Attacker, caplog: pytest.LogCaptureFixture) -> Iterator[Attacker]:
    yield running_attacker
    assert running_attacker.is_served()
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
    assert SECRET not in caplog.text

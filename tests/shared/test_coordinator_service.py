"""The coordinator is found by its entry point; without one, or with one that cannot be loaded, an error says so."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from slipway.contracts import coordinator
from slipway.contracts.coordinator import GROUP, NAME, CoordinatorService, coordinator_service
from slipway.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    coordinator_service.cache_clear()
    yield
    coordinator_service.cache_clear()


def test_the_installed_coordinator_is_found() -> None:
    assert isinstance(coordinator_service(), CoordinatorService)


@pytest.mark.parametrize("value", ["", "nowhere_at_all:SERVICE", "slipway.errors:NOTHING", "slipway.errors:Failure"])
def test_without_a_coordinator_the_remedy_is_to_install_it(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    # Slipway's own entry point cannot be uninstalled for one test.
    entries = EntryPoints([EntryPoint(NAME, value, GROUP)] if value else [])
    monkeypatch.setattr(coordinator, "installed_entry_points", lambda _: entries)
    with pytest.raises(ConfigurationError, match="pip install --force-reinstall") as caught:
        coordinator_service()
    assert caught.value.reason == "SERVICE_UNKNOWN"

"""A coordinator with a worker for the examples of pipelines, and environments of the platforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.commands.platforms import Platform, platform
from support.coordinators.pipeline_site import PipelineSite, pipeline_site
from support.servers.s3_server import S3Server


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> Iterator[PipelineSite]:
    with pipeline_site(tmp_path_factory.mktemp("pipelines"), s3) as site:
        yield site


@pytest.fixture(scope="session")
def platforms(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Platform]:
    """Return the environment of a platform by its name; it is made for the first test that needs it."""
    found: dict[str, Platform] = {}

    def of(name: str) -> Platform:
        if name not in found:
            found[name] = platform(name, tmp_path_factory)
        return found[name]

    return of

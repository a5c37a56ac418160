"""Where the password of a registry comes from, and that it is shown nowhere."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest

from slipway.errors import ModelExportError
from slipway.publishing.destination import Access
from slipway.publishing.oci.address import find_credentials, parse_address
from slipway.publishing.oci.reading import check_registry
from slipway.publishing.publisher import publish
from slipway.publishing.signatures.trust import TrustedKey
from support.servers.registry_server import PASSWORD, USER, needs_registry, registry_server

pytest.importorskip("model_signing", reason="the extra publish is not installed")


@needs_registry
def test_docker_s_configuration_and_the_variables_have_the_password(
    tmp_path: Path, folder: Path, access: Access, keys: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    with registry_server(tmp_path / "guarded", password=True) as server:
        url = f"oci://{server.host}/guarded/run:v1"
        with pytest.raises(ModelExportError) as caught:
            publish(folder, [url], access=access)
        assert caught.value.reason == "STORE_DENIED"
        (tmp_path / "docker").mkdir()
        entry = {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
        (tmp_path / "docker" / "config.json").write_text(json.dumps({"auths": {server.host: entry}}))
        publish(folder, [url], access=access, key=keys[0])
        check_registry(url, access, trusted=TrustedKey(keys[1]))
        (tmp_path / "docker" / "config.json").unlink()
        named = {"SLIPWAY_REGISTRY_USER": USER, "SLIPWAY_REGISTRY_PASSWORD": PASSWORD}
        check_registry(url, replace(access, environment={**access.environment, **named}), trusted=TrustedKey(keys[1]))
        wrong = {"SLIPWAY_REGISTRY_USER": USER, "SLIPWAY_REGISTRY_PASSWORD": "wrong-secret"}
        with pytest.raises(ModelExportError) as caught:
            check_registry(url, replace(access, environment={**access.environment, **wrong}))
        assert caught.value.reason == "STORE_DENIED"
        assert "wrong-secret" not in str(caught.value)
    said = capfd.readouterr()
    assert PASSWORD not in said.out + said.err


def test_a_helper_of_docker_s_is_asked(tmp_path: Path, access: Access) -> None:
    helper = tmp_path / "docker-credential-tests"
    helper.write_text('#!/bin/sh\nread host; echo "{\\"Username\\": \\"me\\", \\"Secret\\": \\"of $host\\"}"\n')
    helper.chmod(0o755)
    (tmp_path / "docker").mkdir()
    file = tmp_path / "docker" / "config.json"
    file.write_text(json.dumps({"credHelpers": {"registry.test": "tests"}}))
    environment = {**access.environment, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    found = find_credentials(parse_address("oci://registry.test/a/b:c"), environment)
    assert found is not None
    assert (found.user, found.secret.get_secret_value()) == ("me", "of registry.test")
    assert "of registry.test" not in repr(found)
    for content in (
        {"credHelpers": {"registry.test": "absent"}},
        {"credsStore": "../x"},
        {"auths": {"registry.test": {"auth": "?"}}},
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(ModelExportError) as caught:
            find_credentials(parse_address("oci://registry.test/a"), environment)
        assert caught.value.reason == "STORE_DENIED"

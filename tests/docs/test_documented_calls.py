"""The calls that docs/clients.md shows, one after the other against a server with TLS and tokens: by grpcurl itself where it is
installed, and always by what it does, which is to ask the server for its descriptors and turn JSON into messages.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from slipway.security.access.access_file import AccessFile
from slipway.security.access.principals import new_token, token_hash
from slipway.security.server import ServerSecurity
from slipway.settings.security import TlsFiles
from support.coordinators.harness import Harness
from support.servers.certificates import Authority

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
(ALIAS,) = re.findall(r"^\$ alias call='(.*)'$", PAGE, re.MULTILINE)
LINES = [line[2:] for line in PAGE.splitlines() if re.match(r"\$ call ", line)]


class Runner(Protocol):
    """Carries out one documented line; answers the messages that came."""

    def __call__(self, line: str) -> list[dict[str, Any]]: ...


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Harness]:
    (tmp_path / "home").mkdir()
    token, access = new_token(), tmp_path / "access.yaml"
    access.write_text(
        f"principals: [{{name: ci, role: operator, projects: [research], token_sha256: {token_hash(token)}}}]"
    )
    (tmp_path / "ci.token").write_text(token)
    authority = Authority(tmp_path / "tls")
    files = authority.files("server", "localhost")
    tls = TlsFiles(certificate=files.certificate, key=files.key)  # without an authority: clients show tokens alone
    security = ServerSecurity(tls=tls, authenticator=AccessFile(access))
    shutil.copy(authority.ca, tmp_path / "ca.pem")
    with Harness(tmp_path / "home", with_worker=False, security=security) as harness:
        yield harness


class Grpcurl:
    """The documented line itself, with this server's address."""

    def __init__(self, place: Harness) -> None:
        self._place, self._folder = place, place.home.parent

    def __call__(self, line: str) -> list[dict[str, Any]]:
        line = ALIAS.replace("\\$", "$") + line.removeprefix("call")
        line = line.replace("coordinator:7070", self._place.address)
        environment = {**os.environ, "TOKEN": (self._folder / "ci.token").read_text()}
        done = subprocess.run(shlex.split(line), cwd=self._folder, env=environment, capture_output=True, text=True)
        ended = {0} if "-max-time" not in line else {68}  # 64 and DEADLINE_EXCEEDED
        assert done.returncode in ended, f"{line}: {done.stderr}"
        if " list " in line:
            return [{"methods": done.stdout.split()}]
        return list(documents(done.stdout))


def documents(text: str) -> Iterator[dict[str, Any]]:
    """JSON documents one after the other."""
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        found, end = decoder.raw_decode(text)
        yield found
        text = text[end:].strip()


class ByReflection:
    """What grpcurl does with a line, in Python."""

    def __init__(self, place: Harness) -> None:
        folder = place.home.parent
        token = grpc.access_token_call_credentials((folder / "ci.token").read_text())
        tls = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
        self._channel = grpc.secure_channel(place.address, grpc.composite_channel_credentials(tls, token))
        self._pool = DescriptorPool(ProtoReflectionDescriptorDatabase(self._channel))

    def __call__(self, line: str) -> list[dict[str, Any]]:
        words = shlex.split(line)
        if "list" in words:
            service = self._pool.FindServiceByName(words[-1])
            return [{"methods": [f"{service.full_name}.{method.name}" for method in service.methods]}]
        name, _, method_name = words[-1].partition("/")
        method = self._pool.FindServiceByName(name).FindMethodByName(method_name)
        request = json_format.Parse(
            words[words.index("-d") + 1], GetMessageClass(method.input_type)(), descriptor_pool=self._pool
        )
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        call = getattr(self._channel, kind)(f"/{words[-1]}", type(request).SerializeToString)
        seconds = float(words[words.index("-max-time") + 1]) if "-max-time" in words else 120.0
        answers = call(iter([request]) if method.client_streaming else request, timeout=seconds)
        answer_type = GetMessageClass(method.output_type)
        found: list[Any] = []
        try:
            found.extend(map(answer_type.FromString, answers if method.server_streaming else [answers]))
        except grpc.RpcError as error:
            assert "-max-time" in words, error
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return [json_format.MessageToDict(one, descriptor_pool=self._pool) for one in found]


@pytest.mark.parametrize("runner", [Grpcurl, ByReflection], ids=["grpcurl", "reflection"])
def test_every_documented_call_works_in_its_order(place: Harness, runner: type[Grpcurl | ByReflection]) -> None:
    if runner is Grpcurl and shutil.which("grpcurl") is None:
        pytest.skip("grpcurl is not installed")
    run: Runner = runner(place)
    answers: dict[str, list[dict[str, Any]]] = {line.split("/")[-1].split(" ")[-1]: run(line) for line in LINES}
    assert "slipway.v1.ExportService.CreateExport" in answers.pop("slipway.v1.ExportService")[0]["methods"]
    (made,) = answers["CreateArtifact"]
    digest = made.pop("digest")
    assert made == {}, "content is missing"
    assert f"artifacts/{digest}" in PAGE
    assert answers["ListArtifacts"] == [{"digests": [digest]}]
    assert [file["path"] for file in answers["GetArtifact"][0]["files"]] == ["hello.txt"]
    assert answers["ReadBlob"] == [{"data": "aGVsbG8=", "sizeBytes": "5"}]
    assert answers["CreateExport"][0]["sources"]["base"] == digest
    assert answers["ListExports"][0]["exports"][0]["name"] == "projects/research/exports/x"
    assert answers["WatchExport"][-1]["export"]["state"] == "EXPORT_STATE_CANCELLED"
    assert answers["RetryExport"][0]["state"] == "EXPORT_STATE_QUEUED"
    assert answers["LocateBlob"] == [{}], "its store is a folder"
    assert answers["WriteBlob"] == answers["GetUpload"] == answers["DeleteExport"] == answers["DeleteArtifact"] == [{}]
    assert len(answers["ListFormats"][0]["formats"]) == 5
    assert answers["ListWorkers"] == [{}], "none has joined"
    assert [each["name"] for each in answers["ListProjects"][0]["projects"]] == ["projects/research"]
    assert [*answers["WatchExports"][0]][-1] == "bookmark"
    assert answers["Check"] == [{"status": "SERVING"}]

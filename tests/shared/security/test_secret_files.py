"""Tokens, the access file, and settings: nothing of a secret ever comes out of them."""

from __future__ import annotations

import itertools
import re
import sys
import traceback
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from slipway.errors import ModelExportError
from slipway.observability.telemetry import recording, span
from slipway.security.access.access_file import AccessFile, load_access
from slipway.security.access.principals import is_token, match_hashes, new_token, token_hash
from slipway.security.channels import Identity
from slipway.security.server import coordinator_security
from slipway.settings import Settings
from slipway.settings.security import Security
from support.commands.cli import run_here

TOKEN = "slipway_" + "tHe-sAmE_in-EVERY-w0rker" * 2  # it is in names of tests
KEY = "-----BEGIN PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC/Ke+wggSjAgEAAo\n" * 26


def entry(**changes: object) -> str:
    fields = {"name": "a", "role": "viewer", "projects": ["red"], "token_sha256": token_hash(TOKEN)} | changes
    return "principals:\n  - " + str({key: value for key, value in fields.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the document"),
        ("principals: [", "not a YAML document"),
        (entry(token_sha256=TOKEN), "never the token itself"),
        (entry(token_sha256=None), "token_sha256 or certificate"),
        (entry(role="root"), "role"),
        (entry(projects=None), "name its projects"),
        (entry(projects=["Red/.."]), "not the name of a project"),
        ('principals: [{name: a, role: viewer, projects: ["red\\n"], certificate: x}]', "not the name of a project"),
        (entry(certificate="x", token_sha256=None, expires="2027-06-30"), "expires is of a token"),
        (entry(role="worker"), "leave out projects"),
        (entry(token=TOKEN), "Extra inputs"),
        (entry() + "\n" + entry().split("\n")[1], "same name"),
        (entry() + "\n" + entry(name="b").split("\n")[1], "same token_sha256"),
    ],
)
def test_an_access_file_that_is_wrong_says_where_and_repeats_no_secret(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "access.yaml"
    path.write_text(text)
    with pytest.raises(ModelExportError, match=message) as caught:
        load_access(path)
    assert caught.value.reason == "ACCESS_INVALID"
    assert str(path) in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_an_access_file_may_have_thousands_of_principals(tmp_path: Path) -> None:
    path = tmp_path / "access.yaml"

    def calls_to_load(principals: int) -> int:
        rows = (f"{{name: s{n}, role: viewer, projects: [red], certificate: s{n}.slipway}}" for n in range(principals))
        path.write_text("principals:\n" + "".join(f"  - {row}\n" for row in rows))
        calls = itertools.count()
        sys.setprofile(lambda *_: next(calls))
        try:
            loaded = load_access(path)
        finally:
            sys.setprofile(None)
        assert len(loaded.principals) == principals
        return next(calls)

    few, many = calls_to_load(200), calls_to_load(1600)
    assert many < 9 * few, "eight times as many principals are eight times the work"
    path.write_text(f"principals: [{'x, ' * 50_001}]")
    with pytest.raises(ModelExportError, match=r"more than 50000 values") as caught:
        load_access(path)
    assert caught.value.reason == "ACCESS_INVALID"


@pytest.mark.parametrize("text", [f"principals: !!int {TOKEN}", f"principals: *{TOKEN}", f"principals: !{TOKEN} x"])
def test_an_access_file_that_is_no_yaml_names_the_line_and_repeats_no_secret(tmp_path: Path, text: str) -> None:
    path = tmp_path / "access.yaml"
    path.write_text("# who there is\n" + text)
    with pytest.raises(ModelExportError, match="line 2: not a YAML document") as caught:
        load_access(path)
    assert TOKEN not in str(caught.value)


async def test_a_token_finds_its_principal_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "access.yaml"
    path.write_text(entry(name="one") + "\n" + entry(name="two", token_sha256=token_hash("x" * 20)).split("\n")[1])
    file = AccessFile(path)
    assert (await file.identify(token=TOKEN, certificate_names=())).name == "one"
    assert (await file.identify(token="x" * 20, certificate_names=["two"])).name == "two"
    for token, names in ((token_hash(TOKEN), ()), (TOKEN[:-1], ()), ("", ()), ("", ["one"])):
        with pytest.raises(ModelExportError) as caught:
            await file.identify(token=token, certificate_names=names)
        assert caught.value.reason == "UNAUTHENTICATED"


async def test_a_wrong_token_is_not_made_right_by_a_certificate(tmp_path: Path) -> None:
    path = tmp_path / "access.yaml"
    path.write_text(entry(token_sha256=None, certificate="a.slipway"))
    assert (await AccessFile(path).identify(token="", certificate_names=["a.slipway"])).name == "a"
    with pytest.raises(ModelExportError):
        await AccessFile(path).identify(token=TOKEN, certificate_names=["a.slipway"])


def test_tokens_are_long_and_all_compared() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(is_token(token) and len(token) > 40 for token in tokens)
    assert match_hashes(TOKEN, [token_hash(TOKEN), token_hash("b"), token_hash(TOKEN)]) == [True, False, True]


async def test_the_command_writes_what_an_access_file_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token_file, access = tmp_path / "token", tmp_path / "access.yaml"
    words = ["token", "--name", "ci", "--role", "submitter", "--project", "red", "--project", "blue"]
    assert run_here(*words, "--token-file", token_file) == 0
    assert token_file.stat().st_mode & 0o777 == 0o600
    out = capsys.readouterr().out
    token = token_file.read_text().strip()
    assert token not in out
    assert run_here(*words, "--token-file", token_file) == 3  # never overwritten
    assert token_file.read_text().strip() == token
    access.write_text("principals:\n" + out)
    principal = await AccessFile(access).identify(token=token, certificate_names=())
    assert (principal.name, principal.projects) == ("ci", frozenset({"red", "blue"}))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--name", "a: {b", "--role", "viewer", "--project", "*"], 0),
        (["--name", "w", "--role", "worker"], 0),
        (["--name", "w", "--role", "worker", "--project", "red"], 3),
        (["--name", "v", "--role", "viewer"], 3),
        (["--name", "v", "--role", "viewer", "--project", "Red/.."], 3),
        (["--name", "v", "--role", "root"], 2),
    ],
)
async def test_the_command_makes_no_entry_that_is_refused_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int
) -> None:
    token_file, access = tmp_path / "token", tmp_path / "access.yaml"
    assert run_here("token", *words, "--token-file", token_file) == code
    assert token_file.exists() is (code == 0)
    out = capsys.readouterr().out
    assert bool(out) is (code == 0)
    if out:
        access.write_text("principals:\n" + out)
        token = token_file.read_text().strip()
        assert (await AccessFile(access).identify(token=token, certificate_names=())).name == words[1]


@pytest.mark.parametrize(
    "typed",
    [TOKEN, "c2VjcmV0/dG9rZW4vMDEyMzQ1Njc4OQ==", "/c2VjcmV0/dG9rZW4v", KEY],
    ids=["token", "with-slash", "absolute", "key"],
)
@pytest.mark.parametrize("setting", ["token_file", "tls_ca_file", "tls_cert_file", "tls_key_file", "access_file"])
def test_a_secret_that_is_typed_as_a_path_is_not_repeated(setting: str, typed: str) -> None:
    """Neither in the error nor in what a traced call records of it, whatever other error it comes from."""
    files = {setting: typed}
    if setting in {"tls_cert_file", "tls_key_file"}:
        files = {"tls_cert_file": typed, "tls_key_file": typed}
    security = Security.model_validate(files)
    spans = InMemorySpanExporter()
    use = coordinator_security if setting == "access_file" else Identity
    with recording(spans), pytest.raises(ModelExportError) as caught, span("call"):
        use(address="localhost:1", security=security)
    recorded = "".join(found.to_json() for found in spans.get_finished_spans())
    assert "ConfigurationError" in recorded
    shown = [str(caught.value), repr(caught.value.failure()), *traceback.format_exception(caught.value), recorded]
    assert [text for text in shown if typed in text or typed.splitlines()[0] in text] == []
    assert f"--{setting.replace('_', '-')}" in str(caught.value) or setting == "tls_key_file"


def test_a_path_that_leads_nowhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secrets").mkdir()
    for path in (str(tmp_path / "no" / "such.token"), "secrets/ci.token", "../ci.token"):
        with pytest.raises(ModelExportError, match=re.escape(path)):
            Identity("localhost:1", Security.model_validate({"token_file": path}))


def test_settings_never_show_a_token(tmp_path: Path) -> None:
    settings = Settings.from_environment({"SLIPWAY_HOME": str(tmp_path), "SLIPWAY_TOKEN": TOKEN})
    assert Identity("localhost:1", settings.security).metadata() == (("authorization", f"Bearer {TOKEN}"),)
    for text in (repr(settings), str(settings), settings.model_dump_json(), repr(settings.security)):
        assert TOKEN not in text


def test_the_token_file_is_read_again_and_wins(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{'a' * 20}\n")
    identity = Identity(
        "localhost:1", Security.from_environment({"SLIPWAY_TOKEN_FILE": str(file), "SLIPWAY_TOKEN": TOKEN})
    )
    assert identity.metadata() == (("authorization", "Bearer " + "a" * 20),)
    file.write_text("b" * 21)
    assert identity.metadata() == (("authorization", "Bearer " + "b" * 21),)
    file.unlink()
    assert identity.metadata() == (("authorization", "Bearer " + "b" * 21),)


@pytest.mark.parametrize("text", ["", "short", "two words of a token", "line\nfeed of a token", "é" * 20])
def test_what_cannot_travel_as_a_token_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ModelExportError, match="holds no token") as caught:
        Identity("localhost:1", Security(token_file=file))
    assert not text or text not in str(caught.value)


def test_a_token_file_that_is_not_there_is_not_called_empty(tmp_path: Path) -> None:
    with pytest.raises(ModelExportError, match=r"nothing\.token cannot be read: No such file"):
        Identity("localhost:1", Security(token_file=tmp_path / "nothing.token"))

"""No secret that somebody types reaches a terminal, a log or a span, however it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.errors import ModelExportError
from slipway.settings.s3 import parse_s3_url
from slipway.sources.addresses import parse_hub_url
from slipway.texts import redact
from support.commands.cli import run_here
from support.hostile.json_grammar import answer

SECRETS = ("passw0rd1234", "pa/ssw0rd1234", "p@ssw0rd1234", "p/a@s:sw0rd1234", "1234/5@passw0rd")


@pytest.mark.parametrize("secret", [*SECRETS[:-1], "12345678/passw0rd"])
@pytest.mark.parametrize("address", ["s3://user:{}@bucket/x", "/work/https:/user:{}@host", "postgresql://:{}@host/db"])
def test_a_password_of_an_address_is_removed_whole(secret: str, address: str) -> None:
    for form in ("{}", '{{"key": "{}", "mail": "a@b"}}', "cannot read {}; try mail@example.org"):
        shown = redact(form.format(address.format(secret)))
        assert shown == form.format(address.format("***"))


@pytest.mark.parametrize("secret", SECRETS[:-1])
def test_a_refused_address_is_shown_without_its_user_and_its_query(secret: str) -> None:
    for address in (f"s3://user:{secret}@bucket", f"s3://{secret}@bucket/run", f"hf://user:{secret}@owner/name",
                    f"s3://bucket/run?X-Amz-Security-Token={secret}", f"hf://owner/name?token={secret}@main"):  # fmt: skip
        with pytest.raises(ModelExportError) as refused:
            (parse_hub_url if address.startswith("hf") else parse_s3_url)(address)
        assert secret[-8:] not in f"{refused.value} {refused.value.about}"
    with pytest.raises(ModelExportError, match="hf://an owner/name@main"):
        parse_hub_url("hf://an owner/name@main")


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:9000/models/name@main",
        "hf://owner/name@main",
        "s3://bucket/run@2: a",
        "mail a@b: c@d",
        "see https://example.org/a:b",
        "14:03:02 http://host:80/ and a@b",
    ],
)
def test_what_is_no_password_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("text", ["://:x" * 100_000, "://" + "x" * 500_000, ":/a:" * 100_000, "a://b:" + "@" * 500_000])
def test_redaction_takes_no_time_that_grows_with_the_square(text: str) -> None:
    # Less than 1 s on an idle machine; minutes if each character looked at all others.
    answer(lambda: redact(text), seconds=5)


@pytest.mark.parametrize(
    "words",
    [
        ("export", "--plan", "--base-model", "{}"),
        ("export", "--plan", "--base-model", "{base}", "--checkpoint", "{}"),
        ("export", "--plan", "--base-model", "{base}", "--out", "{}"),
        ("export", "--plan", "-c", "{}"),
        ("export", "--plan", "--set", "output.directory={}"),
        ("checkpoints", "{}"),
        ("push", "{}"),
        ("verify", "{}"),
        ("pull", "sha256:" + "0" * 64, "{}"),
        ("stage", "merge", "--input", "base={}"),
        ("export", "{}"),
        ("{}",),
        ("export", "--{}"),
        ("list", "--coordinator", "{}"),
    ],
    ids=" ".join,
)
def test_no_command_shows_a_password_that_was_typed(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SLIPWAY_TRACING", "console")
    monkeypatch.setenv("COLUMNS", "60")
    (tmp_path / "base").mkdir()
    secret = "p@s/sw0rd1234"
    given = [
        word.replace("{}", f"s3://user:{secret}@bucket/x").replace("{base}", str(tmp_path / "base")) for word in words
    ]
    for more in (("--debug",), ("--json",)):
        assert run_here(*given, *more) in {2, 3}
        out, err = capfd.readouterr()
        shown = "".join((out + err).split())
        # Spans, which this test has on the terminal, carry stack traces; nothing else does.
        assert "Traceback" not in "".join(line for line in err.splitlines() if not line.startswith('{"name"'))
        assert secret not in shown
        assert secret[-9:] not in shown

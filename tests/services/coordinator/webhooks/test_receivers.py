"""The webhooks file: what it takes, every problem told at once, and changes without a restart."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.errors import ConfigurationError
from slipway_coordinator.webhooks.cloud_events import EventType
from slipway_coordinator.webhooks.receivers import WebhooksFile, load_webhooks
from support.servers.certificates import Authority
from support.servers.webhook_receiver import SECRET, webhooks_file

HIDDEN = "c2VjcmV0"  # stands in secrets and addresses that no message may repeat
GOOD = {"name": "portal", "url": "https://portal.example/hook", "secret_file": "secret"}


def refusal(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_webhooks(path)
    assert caught.value.reason == "WEBHOOKS_INVALID"
    assert str(path) in caught.value.message
    assert HIDDEN not in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_receiver_with_all_settings(tmp_path: Path) -> None:
    entry = {
        **GOOD,
        "url": "http://10.0.0.1:8080/hook?key=1",
        "allow_http": True,
        "projects": ["research", "speech"],
        "events": ["export.succeeded", "export.deleted"],
        "timeout_seconds": 5,
        "keep_hours": 1,
    }
    webhooks = load_webhooks(webhooks_file(tmp_path, entry, source="https://slipway.example"))
    (receiver,) = webhooks.receivers
    assert (webhooks.source, receiver.name, receiver.secrets) == ("https://slipway.example", "portal", (SECRET,))
    told = [
        (event, project)
        for event in EventType
        for project in ("research", "speech", "vision")
        if receiver.entry.is_told(event, project)
    ]
    assert told == [(e, p) for e in (EventType.SUCCEEDED, EventType.DELETED) for p in ("research", "speech")]
    assert SECRET not in repr(webhooks)


def test_what_is_left_out_is_everything(tmp_path: Path) -> None:
    (receiver,) = load_webhooks(webhooks_file(tmp_path, GOOD)).receivers
    assert all(receiver.entry.is_told(event, "any") for event in EventType)


BAD_ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": ({"retries": 3}, "receivers.0.retries: Extra inputs"),
    "no name": ({"name": ""}, "receivers.0.name"),
    "a name that is none": ({"name": "Portal 1"}, "receivers.0.name"),
    "plain HTTP": ({"url": "http://portal.example/hook"}, "portal: url begins with https://"),
    "another scheme": ({"url": "file:///etc/passwd"}, "portal: url begins with https://"),
    "no host": ({"url": "https:///hook"}, "portal: url begins with https://"),
    "no address": ({"url": HIDDEN}, "portal: url begins with https://"),
    "a password": ({"url": f"https://me:{HIDDEN}@portal.example"}, "portal: url has no user, password"),
    "a fragment": ({"url": f"https://portal.example/#{HIDDEN}"}, "portal: url has no user, password"),
    "a line end": ({"url": f"https://portal.example/\r\nX: {HIDDEN}"}, "portal: url has no user, password"),
    "an impossible port": ({"url": f"https://portal.example:{HIDDEN}/"}, "portal: url cannot be read"),
    "half an address": ({"url": f"https://[{HIDDEN}"}, "portal: url cannot be read"),
    "other letters": ({"url": "https://portal.example/ü"}, "portal: url is ASCII"),
    "an address of a wrong type": ({"url": ["https://portal.example"]}, "receivers.0.url"),
    "an impossible project": ({"projects": ["Research!"]}, "'Research!' is not the name of a project"),
    "no project": ({"projects": []}, "receivers.0.projects"),
    "an unknown event": ({"events": ["export.paused"]}, "receivers.0.events.0: Input should be 'export.created'"),
    "no event": ({"events": []}, "receivers.0.events"),
    "no time": ({"timeout_seconds": 0}, "receivers.0.timeout_seconds"),
    "too much time": ({"timeout_seconds": 600}, "receivers.0.timeout_seconds"),
    "not a number": ({"keep_hours": ".nan"}, "receivers.0.keep_hours"),
    "an endless time": ({"keep_hours": float("inf")}, "receivers.0.keep_hours"),
    "no such secret": ({"secret_file": "missing"}, "portal: secret_file cannot be read: No such file"),
    "the secret itself": ({"secret_file": f"whsec_{HIDDEN}"}, "portal: secret_file cannot be read: No such file"),
    "a folder for a secret": ({"secret_file": "."}, "portal: secret_file cannot be read: Is a directory"),
    "no such authority": ({"ca_file": "missing"}, "portal: ca_file has no certificates that can be used: No such file"),
    "no authority": ({"ca_file": "secret"}, "portal: ca_file has no certificates that can be used"),
}


@pytest.mark.parametrize("what", BAD_ENTRIES)
def test_a_bad_entry_is_named(tmp_path: Path, what: str) -> None:
    change, problem = BAD_ENTRIES[what]
    assert problem in refusal(webhooks_file(tmp_path, GOOD | change))


def key(size: int) -> str:
    return base64.b64encode(os.urandom(size)).decode()


BAD_SECRETS = {
    "nothing": ("", "has 0 secrets"),
    "blank lines": ("\n \n", "has 0 secrets"),
    "too many": ("\n".join([f"whsec_{HIDDEN * 6}"] * 5), "has 5 secrets"),
    "without its beginning": (HIDDEN * 6, "takes whsec_"),
    "too short": (f"whsec_{HIDDEN}", "takes whsec_"),
    "too long": (f"whsec_{key(65)}", "takes whsec_"),
    "not base64": (f"whsec_{HIDDEN * 6}!", "takes whsec_"),
    "base64 of addresses": ("whsec_" + base64.urlsafe_b64encode(b"\xff" * 32).decode(), "takes whsec_"),
    "not text": ("whsec_ü", "is not text"),
    "a large file": (f"{HIDDEN}\n" * 1000, "cannot be read: larger than 4096 bytes"),
}


@pytest.mark.parametrize("what", BAD_SECRETS)
def test_a_bad_secret_is_refused_and_not_shown(tmp_path: Path, what: str) -> None:
    text, problem = BAD_SECRETS[what]
    assert f"portal: secret_file {problem}" in refusal(webhooks_file(tmp_path, GOOD, secret=text))


def test_a_pipe_in_place_of_a_file_holds_nothing_up(tmp_path: Path) -> None:
    path = webhooks_file(tmp_path, GOOD, GOOD | {"name": "other", "secret_file": "pipe", "ca_file": "pipe"})
    os.mkfifo(tmp_path / "pipe")
    message = refusal(path)
    assert "other: secret_file cannot be read: not a regular file but a pipe" in message
    assert "other: ca_file has no certificates that can be used: not a regular file but a pipe" in message


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    entries = [{**GOOD, "name": name, "secret_file": f"{name}.secret"} for name in ("one", "two")]
    message = refusal(webhooks_file(tmp_path, *entries, GOOD))
    assert message.count("No such file") == 2
    message = refusal(webhooks_file(tmp_path, GOOD | {"url": "ftp://a"}, GOOD | {"events": ["x"]}, more=1))
    assert "receivers.0: portal: url" in message
    assert "receivers.1.events.0" in message
    assert "more: Extra inputs" in message


BAD_FILES = {
    "nothing": ("", "the document: Input should be"),
    "no receivers": ("source: /slipway", "receivers: Field required"),
    "no YAML": (f"receivers: [{HIDDEN}", "line 2: did not find expected"),
    "an alias": (f"receivers: &all [{HIDDEN}]\nsource: *all", "it has an alias (*)"),
    "deep": ("[" * 40 + "]" * 40, "nested more than 32 deep"),
    "large": ("#" * (300 << 10), "it has more than 262144 bytes"),
    "a source that is no URI": (
        yaml.safe_dump({"source": "my\u202ecoordinator", "receivers": [GOOD]}),
        "source is a URI",
    ),
    "two of a name": (yaml.safe_dump({"receivers": [dict(GOOD), dict(GOOD)]}), "two receivers have the name portal"),
    "too many": (yaml.safe_dump({"receivers": [dict(GOOD) for _ in range(17)]}), "at most 16 items"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_bad_file_is_refused(tmp_path: Path, what: str) -> None:
    text, problem = BAD_FILES[what]
    path = webhooks_file(tmp_path)
    path.write_text(text)
    assert problem in refusal(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "webhooks.yaml")
    assert "Is a directory" in refusal(tmp_path)


def test_a_file_may_name_no_receiver(tmp_path: Path) -> None:
    """So that what waits for those that it named before is given up."""
    assert load_webhooks(webhooks_file(tmp_path)).receivers == ()


def refreshed(watched: WebhooksFile) -> tuple[str, ...]:
    watched.refresh()
    return watched.current().receivers[0].secrets


def test_files_are_read_again_when_they_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = webhooks_file(tmp_path, GOOD)
    watched = WebhooksFile(path)
    second = f"whsec_{key(32)}"
    (tmp_path / "secret").write_text(f"{second}\n{SECRET}\n")
    assert refreshed(watched) == (second, SECRET)
    (tmp_path / "secret").write_text("none")
    assert refreshed(watched) == (second, SECRET), "what cannot be used changes nothing"
    (tmp_path / "other").write_text(second)
    path.write_text(yaml.safe_dump({"receivers": [GOOD | {"secret_file": "other"}]}))
    assert refreshed(watched) == (second,)
    (tmp_path / "other").write_text(f"{SECRET}\n\n")
    assert refreshed(watched) == (SECRET,), "a file named only now is watched, too"
    path.unlink()
    assert refreshed(watched) == (SECRET,)
    assert "the files loaded before stay in use" in caplog.text
    assert second not in caplog.text
    assert "none" not in [record.message.rpartition(" ")[2] for record in caplog.records]


def test_a_file_may_name_a_secret_that_comes_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = webhooks_file(tmp_path, GOOD)
    watched = WebhooksFile(path)
    path.write_text(yaml.safe_dump({"receivers": [GOOD | {"secret_file": "later"}]}))
    for _ in range(3):
        assert refreshed(watched) == (SECRET,)
    assert caplog.text.count("the files loaded before stay in use") == 1
    (tmp_path / "later").write_text(second := f"whsec_{key(32)}")
    assert refreshed(watched) == (second,)
    path.write_text("receivers: [")
    watched.refresh()
    assert caplog.text.count("the files loaded before stay in use") == 2


def test_authorities_are_read_once_for_all_receivers(tmp_path: Path) -> None:
    """The system's take many milliseconds."""
    authority = {"ca_file": str(Authority(tmp_path / "authority").ca)}
    entries = [GOOD | {"name": f"a{number}"} | (authority if number % 2 else {}) for number in range(16)]
    receivers = load_webhooks(webhooks_file(tmp_path, *entries)).receivers
    assert len({id(receiver.tls) for receiver in receivers}) == 2
    assert receivers[0].tls is receivers[2].tls
    assert receivers[1].tls is receivers[3].tls


def test_a_change_waits_for_no_file(tmp_path: Path) -> None:
    """The receivers of this moment are asked for within the transactions of all changes, and on the event loop."""
    path = webhooks_file(tmp_path, GOOD)
    watched = WebhooksFile(path)
    path.write_text("receivers: []")
    assert len(watched.current().receivers) == 1, "only refresh() reads"
    watched.refresh()
    assert watched.current().receivers == ()

"""The operator's list of addresses that workers may import from."""

from __future__ import annotations

import pytest

from slipway.errors import ConfigurationError, ModelExportError
from slipway.sources.addresses import Allowed

LIST = "s3://training/{project}, s3://models hf://Qwen hf://org/tiny"


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("s3://training/red/run-17", True),
        ("s3://training/red", True),
        ("s3://training/red/", True),
        ("s3://models", True),
        ("s3://models/a/b", True),
        ("hf://Qwen/Qwen3-0.6B", True),
        ("hf://Qwen/Qwen3-0.6B@refs/pr/1", True),
        ("hf://org/tiny@main", True),
        ("s3://training/blue/run-17", False),
        ("s3://training/redder/run", False),
        ("s3://training", False),
        ("s3://training/red/../blue", False),
        ("s3://training/red//x", False),
        ("s3://training/./red", False),
        ("s3://models-of-others/x", False),
        ("hf://Qwen2/x", False),
        ("hf://org/tiny-2", False),
        ("hf://org", False),
        ("/etc/passwd", False),
        ("file:///etc/passwd", False),
        ("sha256:" + "0" * 64, False),
        ("", False),
    ],
)
def test_a_list_says_what_may_be_imported(url: str, allowed: bool) -> None:
    check = Allowed.parse(LIST).check
    if allowed:
        check(url, project="red")
        return
    with pytest.raises(ModelExportError) as raised:
        check(url, project="red")
    assert raised.value.reason == "SOURCE_NOT_ALLOWED"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://127.0.0.1/x", "STORE_INVALID"),
        ("s3://user:secret@models/x", "STORE_INVALID"),
        ("hf://../x", "BASE_MODEL_NOT_FOUND"),
        ("hf://Qwen/../x", "BASE_MODEL_NOT_FOUND"),
        ("hf://Qwen/x@../../api", "BASE_MODEL_NOT_FOUND"),
        ("hf://Qwen/x@", "BASE_MODEL_NOT_FOUND"),
        ("hf://Qwen/x?y", "BASE_MODEL_NOT_FOUND"),
    ],
)
def test_what_is_no_address_is_not_looked_for(url: str, reason: str) -> None:
    with pytest.raises(ModelExportError) as raised:
        Allowed.parse("s3:// hf://").check(url, project="red")
    assert raised.value.reason == reason
    assert "secret" not in str(raised.value)


def test_without_a_list_nothing_may_be_imported_and_without_a_project_nothing_of_one() -> None:
    for allowed, project in ((Allowed(), "red"), (Allowed.parse("s3://training/{project}"), "")):
        with pytest.raises(ModelExportError) as raised:
            allowed.check("s3://training/red/x", project=project)
        assert raised.value.reason == "SOURCE_NOT_ALLOWED"


@pytest.mark.parametrize("entry", ["training", "/models", "https://hub", "s3://a/../b", "s3://x/{project}y", "s3://{project}", "s3://a_/b", "hf://a@b"])  # fmt: skip
def test_an_entry_that_is_no_address_is_said(entry: str) -> None:
    with pytest.raises(ConfigurationError, match="SLIPWAY_IMPORT_FROM names"):
        Allowed.parse(entry)

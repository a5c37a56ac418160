"""Odd forms of YAML: each is the value that YAML 1.1 gives it, or an error with a reason, in bounded time and memory."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import pytest

from slipway.configuration import load
from slipway.errors import ConfigurationError, ModelExportError
from slipway.files.yaml_files import LISTS, YamlError, load_document
from slipway.security.access.access_file import load_access
from slipway_coordinator.lifecycle.rules import load_rules
from support.hostile.texts import within_bounds


def setting(key: str, value: str) -> bytes:
    """A file with a checkpoint and one setting."""
    section, name = key.split(".")
    inside = f"path: {value}" if key == "checkpoint.path" else f"path: /run}}, {section}: {{{name}: {value}"
    return f"export: {{checkpoint: {{{inside}}}}}\n".encode()


def read(path: Path, data: bytes, key: str) -> Any:
    path.write_bytes(data)
    found = load(path, environment={}).configuration
    for part in key.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("combination.seed", "1_000", 1000),
        ("combination.seed", "010", 8),
        ("combination.seed", "0x10", 16),
        ("combination.seed", "0b11", 3),
        ("combination.seed", "+5", 5),
        ("resources.stage_timeout_seconds", "1:30", 90),
        ("combination.density", ".5", 0.5),
        ("combination.density", "5.0e-1", 0.5),
        ("validation.enabled", "no", False),
        ("validation.enabled", "OFF", False),
        ("checkpoint.path", '"/${HOME}/x"', "/${HOME}/x"),
        ("checkpoint.path", "/$HOME/%s", "/$HOME/%s"),
        ("checkpoint.path", '"/no"', "/no"),
        ("resources.stage_timeouts", "{? merge : 5}", {"merge": 5}),
        ("resources.stage_timeouts", '{"merge": 5}', {"merge": 5}),
    ],
)  # fmt: skip
def test_a_value_is_the_one_of_yaml_and_no_variable_is_inserted(
    tmp_path: Path, key: str, text: str, value: Any
) -> None:
    assert read(tmp_path / "export.yaml", setting(key, text), key) == value


@pytest.mark.parametrize(
    "data",
    [
        codecs.BOM_UTF8 + setting("checkpoint.path", "/x"),
        setting("checkpoint.path", "/x").replace(b"\n", b"\r\n"),
        b"export:\r  checkpoint:\r    path: /x\r",
        b"---\nexport: {checkpoint: {path: /x}}\n...\n",
        b"export: {checkpoint: &a {path: &b /x}}",
    ],
    ids=["byte-order-mark", "crlf", "cr", "marks-of-a-document", "anchors"],
)
def test_a_file_may_be_written_in_several_ways(tmp_path: Path, data: bytes) -> None:
    assert read(tmp_path / "export.yaml", data, "checkpoint.path") == "/x"


TEXT = "export: {checkpoint: {path: /x}}"
REFUSED = {
    "text-tag": (setting("checkpoint.path", "!!str /x"), "a tag (!)"),
    "number-tag": (setting("combination.seed", "!!int 5"), "a tag (!)"),
    "table-as-int": (setting("combination.seed", "!!int {=: abc}"), "a tag (!)"),
    "table-of-a-value": (setting("combination.seed", "{=: abc}"), "combination.seed"),
    "own-tag": (setting("checkpoint.path", "!x /x"), "a tag (!)"),
    "no-tag": (setting("checkpoint.path", "! /x"), "a tag (!)"),
    "root-as-set": (f"!!set {{{TEXT}}}".encode(), "a tag (!)"),
    "tagged-document": (b"--- !!map\nexport: {checkpoint: {path: /x}}\n...\n", "a tag (!)"),
    "python-section": (b"export: {checkpoint: !!python/object:os.system {path: /x}}", "a tag (!)"),
    "ordered-section": (b"export: {checkpoint: !!omap [path: /x]}", "a tag (!)"),
    "python-list": (setting("combination.adapters", "!!python/tuple [a]"), "a tag (!)"),
    "binary": (setting("checkpoint.path", "!!binary " + "QUFB" * 50_000), "a tag (!)"),
    "long-tags": (b"%TAG !t! " + b"x" * 100_000 + b"\n---\n- " + b"!t!x a\n- " * 4000, "a tag (!)"),
    "long-tag": (b"export: !<" + b"%41" * 80_000 + b"> x", "a tag (!)"),
    "alias": (b"export: {checkpoint: {path: &a /x}, output: {directory: *a}}", "an alias (*)"),
    "alias-of-a-name": (b"export: {checkpoint: {&a path: /x, *a : /y}}", "an alias (*)"),
    "alias-in-itself": (b"export: &a {checkpoint: *a}", "an alias (*)"),
    "merge": (b"export: {checkpoint: {<<: {path: /y}, path: /x}}", "a merge key (<<)"),
    "merge-of-a-list": (b"export: {checkpoint: {<<: [{path: /x}, {path: /y}]}}", "a merge key (<<)"),
    "merged-text": (b"export: {<<: &a x}", "a merge key (<<)"),
    "merge-as-value": (setting("checkpoint.path", "<<"), "a merge key (<<)"),
    "merged-section": (b"export: {<<: {checkpoint: {path: /y}}, checkpoint: {path: /x}}", "a merge key (<<)"),
    "many-tags": (b"".join(b"%%TAG !t%d! a\n" % n for n in range(15_000)) + b"---\nexport: {}", "%TAG"),
    "name-twice": (b'export: {checkpoint: {path: /x, "path": /y}}', "twice"),
    "escaped-name-twice": (b'export: {checkpoint: {path: /x, "p\\u0061th": /y}}', "twice"),
    "name-in-a-table-twice": (setting("resources.stage_timeouts", '{merge: 5, "merge": 6}'), "'merge' is given twice"),
    "wide-name": ("export: {\uff43heckpoint: {path: /x}}".encode(), "did you mean 'checkpoint'"),
    "kelvin-name": ("export: {chec\u212apoint: {path: /x}}".encode(), "did you mean 'checkpoint'"),
    "cyrillic-name": ("export: {checkp\u043eint: {path: /x}}".encode(), "did you mean 'checkpoint'"),
    "decomposed-names": (setting("resources.stage_timeouts", "{\u00e9: 5, e\u0301: 6}"), "not a stage"),
    "list-as-name": (setting("resources.stage_timeouts", "{[a]: 5}"), "unhashable"),
    "table-as-name": (setting("resources.stage_timeouts", "{{a: b}: 5}"), "unhashable"),
    "nan-as-name": (setting("resources.stage_timeouts", "{.nan: 5}"), "resources.stage_timeouts"),
    "date-as-name": (setting("resources.stage_timeouts", "{2001-99-01: 5}"), "timestamp"),
    "numbers-as-names": (setting("resources.stage_timeouts", "{1: 5, 1.0: 6, true: 7}"), "not a stage"),
    "date": (setting("checkpoint.path", "2024-01-02"), "not a text"),
    "date-of-another-zone": (setting("checkpoint.path", "2001-01-01 00:00:00 +99:99"), "timestamp"),
    "long-fraction": (setting("checkpoint.path", "2001-01-01 00:00:00." + "9" * 100_000), "not a text"),
    "norway": (setting("base_model.name", "no"), "not a text"),
    "octal-of-1.2": (setting("combination.seed", "0o10"), "not a whole number"),
    "exponent": (setting("combination.seed", "1e3"), "not a whole number"),
    "point": (setting("combination.seed", "5.0"), "not a whole number"),
    "wide-digit": (setting("combination.seed", "\uff15"), "not a whole number"),
    "quoted-number": (setting("combination.seed", '"5"'), "not a whole number"),
    "infinity": (setting("combination.density", "-.INF"), "finite"),
    "letter-as-bool": (setting("validation.enabled", "y"), "neither true nor false"),
    "utf-16": (TEXT.encode("utf-16"), "not a text file"),
    "utf-16-without-mark": (TEXT.encode("utf-16-le"), "#x0000"),
    "utf-32": (TEXT.encode("utf-32"), "not a text file"),
    "latin-1": (TEXT.replace("x", "\xe9").encode("latin-1"), "not a text file"),
    "overlong-utf-8": (TEXT.encode().replace(b"/x", b"\xc0\xaf"), "not a text file"),
    "surrogate": (TEXT.encode().replace(b"/x", b"\xed\xa0\x80"), "not a text file"),
    "escaped-surrogate": (setting("checkpoint.path", '"\\ud83d\\ude00"'), "character"),
    "far-character": (setting("checkpoint.path", '"\\UFFFFFFFF"'), "character"),
    "two-documents": (f"{TEXT}\n---\n{TEXT}".encode(), "another document"),
    "very-many-documents": (b"---\n" * 60_000, "another document"),
    "rest-after-the-end": (f"{TEXT}\n...\nx: y".encode(), "expected <document start>"),
    "far-version": (b"%YAML 1." + b"9" * 100_000 + b"\n---\nexport: {}", "version"),
    "long-unfinished-list": (b"export: {a: 1" + b", b" * 6000, "more than 5000 values"),
    "deep-names": (b"? " * 100_000, "nested"),
    "deep-blocks": (b"".join(b" " * n + b"-\n" for n in range(600)), "nested"),
    "layers-of-aliases": (
        b"a0: &a0 {k: 1}\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 29)) + b"export: *a28",
        "an alias (*)",
    ),
    "many-lines": (setting("checkpoint.path", "a\n " * 80_000), "/a a a"),
    "many-escaped-lines": (b'export: {checkpoint: {path: "' + b"\\\n " * 60_000 + b'"}}', "checkpoint.path"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_odd_form_is_refused_by_name(tmp_path: Path, name: str) -> None:
    data, says = REFUSED[name]
    path = tmp_path / "export.yaml"
    path.write_bytes(data)
    with within_bounds(allowed={"CONFIGURATION_INVALID"}), pytest.raises(ConfigurationError) as refused:
        load(path, environment={})
    assert says in refused.value.message
    for read_it in (load_access, load_rules):
        with within_bounds(allowed={"ACCESS_INVALID", "CONFIGURATION_INVALID"}), pytest.raises(ModelExportError):
            read_it(path)
    with within_bounds():
        try:
            load_document(path, limits=LISTS)
        except YamlError as fault:
            assert len(str(fault)) < 1000


def test_a_principal_has_one_role(tmp_path: Path) -> None:
    path = tmp_path / "access.yaml"
    principal = "name: ci, role: viewer, projects: [a], token_sha256: " + "a" * 64
    path.write_text(f"principals: [{{{principal}}}]")
    load_access(path)
    path.write_text(f"principals: [{{{principal}, role: operator}}]")
    with pytest.raises(ConfigurationError, match="line 1: not a YAML document") as refused:
        load_access(path)
    assert refused.value.reason == "ACCESS_INVALID"

"""An installed format that cannot be used is named, refused where it is asked for, and stops nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway.configuration import export, load, parse
from slipway.distribution import DISTRIBUTION
from slipway.errors import ConfigurationError
from slipway.formats import registry
from slipway.formats.registry import formats, load_format, refused_formats
from slipway.machine import doctor
from support.commands.distributions import install_format

OWN = list(formats())
FORMAT = """
from slipway.formats import Format, FormatSettings, LevelSettings, Runtime, Section, SectionRules, Usage

class Settings(FormatSettings):
    squeeze: bool = False

class Nested(FormatSettings):
    part: Section = Section()

class Required(FormatSettings):
    part: int

FORMAT = Format(**{{"name": {name!r}, "title": "T", "settings": Settings, "plan": lambda _: (), **dict({changes})}})
"""


class Site:
    """A folder of the import path in which distributions are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, code: str, *, name: str = "npz", distribution: str = "npz-format") -> None:
        """Install a distribution, and forget what was found before."""
        module = f"{distribution.replace('-', '_')}_{self.folder.name}".replace("-", "_")
        install_format(self.folder, distribution, name=name, module=module, code=code)
        registry._installed.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(tmp_path)
    yield Site(tmp_path)
    monkeypatch.undo()
    registry._installed.cache_clear()


def code(name: str = "npz", changes: str = "") -> str:
    return FORMAT.format(name=name, changes=changes)


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("import a_library_that_is_not_there", "No module named 'a_library_that_is_not_there'"),
        ("FORMAT = ", "SyntaxError"),
        ("import sys\nsys.exit('it needs another Python')", "SystemExit: it needs another Python"),
        ("raise RuntimeError('two\\nlines\\x1b[2J')", "RuntimeError: two lines"),
        ("OTHER = 1", "no attribute 'FORMAT'"),
        ("FORMAT = 1", "is not a Format"),
        (code("npx"), "its name is 'npx'"),
        (code(changes="rank='first'"), "rank: Input should be a valid integer"),
        (code(changes="levels='int8'"), "levels: Input should be a valid tuple"),
        (code(changes="media_types=[('.npz', 'x')]"), "media_types: Input should be a valid"),
        (code(changes="plan=None"), "plan: Input should be callable"),
        (code(changes="settings=dict"), "settings: Input should be a subclass of FormatSettings"),
        (code(changes="group_sizes=(32,)"), "group_sizes: Unexpected keyword argument"),
        (code(changes="settings=Nested"), "its setting 'part' is a section"),
        (code(changes="settings=Required"), "part"),
        (code(changes="rules=SectionRules(variables={'squeeze': 'SQUEEZE'})"), "'SQUEEZE' is not EXPORT_NAME"),
        (code(changes="rules=SectionRules(variables={'squeeze': 'EXPORT_ENABLE_NPZ'})"), "belongs to two settings"),
        (code(changes="runtime=Runtime(name='x', files=('/x',), load='a:b')"), "'/x' cannot be a pattern"),
        (code(changes="usage=Usage(('slipway', 'none.j2'), library='x', packages='x')"), "slipway/none.j2 does not"),
        (
            code(changes="rules=SectionRules(variables={'enabled': 'EXPORT_ENABLE_PYTORCH'})"),
            "shares the variable EXPORT_ENABLE_PYTORCH",
        ),
        (
            code(changes="rules=SectionRules(variables={'squeeze': 'EXPORT_LOG_LEVEL'})"),
            "EXPORT_LOG_LEVEL belongs to log.level",
        ),
    ],
)
def test_a_format_that_cannot_be_used_is_refused_by_name_alone(site: Site, module: str, fault: str) -> None:
    site.install(module)
    assert list(formats()) == OWN
    (refused,) = refused_formats()
    assert (refused.name, refused.distribution) == ("npz", "npz-format")
    assert fault in refused.fault
    assert "\n" not in refused.fault
    assert "\x1b" not in refused.fault
    with pytest.raises(ConfigurationError, match="the installed format 'npz' of npz-format cannot be used") as caught:
        load_format("npz")
    assert caught.value.reason == "FORMAT_INVALID"
    assert "npz-format" in caught.value.remedy


def test_slipways_own_format_is_not_replaced(site: Site) -> None:
    site.install(code("onnx"), name="onnx", distribution="a-other-onnx")
    assert list(formats()) == OWN
    assert load_format("onnx").title == "ONNX"
    (refused,) = refused_formats()
    assert (refused.name, refused.fault) == ("onnx", f"{DISTRIBUTION} has a format of this name too")
    parse({"formats": {"onnx": {"enabled": True}}})


@pytest.mark.parametrize(
    ("other", "changes"), [("npz", ""), ("npy", "rules=SectionRules(variables={'squeeze': 'EXPORT_NPZ_SQUEEZE'})")]
)
def test_two_formats_that_clash_are_both_refused(site: Site, other: str, changes: str) -> None:
    site.install(code())
    site.install(code(other, changes), name=other, distribution="other-format")
    assert list(formats()) == OWN
    assert {(each.name, each.distribution) for each in refused_formats()} == {
        ("npz", "npz-format"),
        (other, "other-format"),
    }


def test_a_refused_format_refuses_no_other(site: Site) -> None:
    site.install(code(changes="rules=SectionRules(variables={'squeeze': 'EXPORT_ENABLE_ONNX'})"))
    site.install(code("npz"), distribution="good-format")
    assert list(formats()) == [*OWN, "npz"]
    assert [each.distribution for each in refused_formats()] == ["npz-format"]
    assert load_format("npz").title == "T"


def test_a_configuration_warns_of_it_and_refuses_its_settings(site: Site, tmp_path: Path) -> None:
    site.install("import a_library_that_is_not_there")
    where = {"EXPORT_BASE_MODEL": "owner/name"}
    found = load(None, environment=where).warnings
    assert any("'npz' of npz-format cannot be used" in warning for warning in found)
    assert export.cautions(parse({})) == tuple(found)
    file = tmp_path / "export.yaml"
    file.write_text("export:\n  formats:\n    npz: {enabled: true}\n")
    for name in ("EXPORT_ENABLE_NPZ", "EXPORT_NPZ_SQUEEZE"):
        with pytest.raises(ConfigurationError, match=f"{name}.*: the installed format 'npz' of npz-format"):
            load(None, environment={**where, name: "true"})
    with pytest.raises(ConfigurationError, match=r"formats\.npz \(export\.yaml:3\): the installed format 'npz'"):
        load(file, environment=where)
    with pytest.raises(ConfigurationError, match=r"formats\.npz\.enabled \(--set .*\): the installed format 'npz'"):
        load(None, environment=where, assignments=["formats.npz.enabled=true"])
    with pytest.raises(ConfigurationError, match=r"formats\.npz: the installed format 'npz'"):
        parse({"formats": {"npz": {"enabled": True}}})


def test_doctor_names_it_and_a_format_whose_plan_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("import a_library_that_is_not_there")
    site.install(code("npy", "plan=lambda request: request.nonesuch"), name="npy", distribution="npy-format")
    found = {each.name: each for each in doctor.format_health(())}
    assert "a_library_that_is_not_there" in found["npz"].detail
    assert "the format npy fails: AttributeError" in found["npy"].detail
    assert not found["npz"].available
    assert not found["npy"].available
    assert set(OWN) < set(found)

"""``slipway.export``, ``plan``, ``recommend`` and ``verify``: what they take, what they refuse, and that they print nothing."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import socket
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import slipway
from slipway.exporting import calls
from slipway.files.checksums import write_checksums
from slipway.reasons import REASONS
from support.commands.cli import run_here
from support.commands.light_install import with_extras_hidden
from support.models import tiny_models
from support.servers.free_ports import free_port


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


@pytest.fixture
def options(project: Path, tmp_path: Path) -> dict[str, Any]:
    return {"base": project / "base", "out": tmp_path / "out", "home": tmp_path / "home"}


def test_a_plan_is_that_of_the_command(
    project: Path,
    options: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(options["home"]))
    words = ("--base-model", options["base"], "--out", options["out"], "-f", "gguf:q8_0,onnx:int8", "--json")
    assert run_here("export", project / "run", *words, "--plan", "--set", "validation.test_samples=2") == 0
    printed = json.loads(capsys.readouterr().out)
    made = slipway.plan(
        str(project / "run"), **options, formats=["gguf:q8_0", "onnx:int8"], settings={"validation.test_samples": 2}
    )
    assert capsys.readouterr() == ("", "")
    plan = json.loads(json.dumps(made.to_json()))
    assert plan["origins"].pop("validation.test_samples") == "settings['validation.test_samples']"
    del printed["origins"]["validation.test_samples"]
    for document in (plan, printed):  # free memory and space differ from one moment to the next
        document["preflight"]["findings"] = [
            finding["check"] for finding in document["preflight"]["findings"] if finding["verdict"] == "ok"
        ]
    assert plan == printed | {"origins": {**printed["origins"], **plan["origins"]}}
    assert made.require() is made
    assert made.possible
    assert made.formats == ("onnx-int8", "gguf-q8_0")
    assert made.expected_seconds > 0
    first, second, third = repr(made).splitlines()
    assert first == "ExportPlan: checkpoint-10 of run onto base"
    assert second.endswith("makes onnx-int8, gguf-q8_0")
    assert (third, len(made.warnings)) == ("possible; 1 warning", 1)
    assert plan["warnings"] == list(made.warnings)
    assert "<td>quantize-onnx-int8</td>" in made._repr_html_()


def written(data: dict[str, Any], folder: Path) -> Path:
    file = folder / "export.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


FORMS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "file": written,
    "text": lambda data, folder: str(written(data, folder)),
    "data": lambda data, _: data["export"],
    "contents": lambda data, _: data,
    "configuration": lambda data, _: slipway.parse_configuration(data["export"]),
    "loaded": lambda data, folder: slipway.load_configuration(written(data, folder), environment={}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_configuration_comes_in_any_form(
    project: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments come before it; ``EXPORT_*`` variables between both, but only where a file is read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXPORT_GROUP_SIZE", "64")
    data = {
        "export": {
            "checkpoint": {"path": "nowhere"},
            "base_model": {"name": str(project / "base")},
            "formats": {"onnx": {"quantization": ["int8"]}},
            "output": {"directory": "made"},
            "validation": {"enabled": False},
        }
    }
    given = FORMS[form](data, tmp_path)
    made = slipway.plan(project / "run", configuration=given, formats="onnx:int4", home=tmp_path / "home")
    configuration = made.loaded.configuration
    assert configuration.checkpoint.path == str(project / "run")
    assert configuration.output.directory == str(tmp_path / "made")
    assert configuration.levels("onnx") == ("int4",)
    assert not configuration.validation.enabled
    assert configuration.optimization.group_size == (64 if form in ("file", "text") else 32)
    assert made.loaded.origins["checkpoint.path"] == "RUN"
    where = "export.yaml:" if form in ("file", "text", "loaded") else "configuration"
    assert made.loaded.origins["validation.enabled"].startswith(where)
    assert made.loaded.origins["base_model.load_in_4bit"] == "default"


def test_settings_are_texts_as_after_set_or_values(project: Path, options: dict[str, Any]) -> None:
    settings = {
        "optimization.quantization": "int8,int4",
        "export.validation.benchmark_performance": False,
        "validation.limits": {"int8": {"mean_kl": 0.5}},
        "optimization.calibration": project / "text.jsonl",
        "combination.adapters": (),
    }
    configuration = slipway.plan(project / "run", **options, settings=settings).loaded.configuration
    assert configuration.levels("onnx") == ("int8", "int4")
    assert configuration.validation.benchmark_performance is False
    assert configuration.validation.limits["int8"].mean_kl == 0.5
    assert configuration.optimization.calibration == str(project / "text.jsonl")


@pytest.mark.parametrize("call", [slipway.export, slipway.plan])
def test_all_problems_of_settings_are_one_error(project: Path, options: dict[str, Any], call: Any) -> None:
    settings = {"optimization.quantisation": "int8", "validation.test_samples": "many", "validation.enabled": 7}
    with pytest.raises(slipway.ConfigurationError) as caught:
        call(project / "run", **options, formats="gguf:q4_k_m,tflite", settings=settings)
    said = str(caught.value)
    for part in ("optimization.quantisation", "settings['validation.test_samples']", "'tflite'", "validation.enabled"):
        assert part in said
    assert caught.value.reason == "CONFIGURATION_INVALID"


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a file as the run": ({"run": "export.yaml"}, "CONFIGURATION_INVALID", "configuration='export.yaml'"),
    "nothing": ({}, "CONFIGURATION_INVALID", "checkpoint.path"),
    "no such file": ({"configuration": "none.yaml"}, "CONFIGURATION_NOT_FOUND", "none.yaml"),
    "no such run": ({"run": "nowhere", "base": "base"}, "CHECKPOINT_NOT_FOUND", "nowhere"),
    "no such section": ({"run": "run", "configuration": {"nonsense": 1}}, "CONFIGURATION_INVALID", "nonsense"),
    "no address": ({"run": "run", "base": "base", "coordinator": "http://x"}, "CONFIGURATION_INVALID", "HOST:PORT"),
    "a format that is off": (
        {"run": "run", "formats": "onnx", "settings": {"formats.onnx.enabled": False}},
        "CONFIGURATION_INVALID",
        "contradicts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_cannot_be_exported_is_a_typed_error(
    project: Path,
    tmp_path: Path,
    case: str,
    asynchronous: bool,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(project)
    arguments, reason, part = REFUSED[case]
    arguments = {**arguments, "out": tmp_path / "out", "home": tmp_path / "home"}

    def call() -> slipway.ExportResult:
        return asyncio.run(slipway.export_async(**arguments)) if asynchronous else slipway.export(**arguments)

    with pytest.raises(slipway.ModelExportError) as caught:
        call()
    assert caught.value.reason == reason
    assert part in str(caught.value)
    assert caught.value.reason in REASONS
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("slipway").handlers == []


def test_a_folder_that_is_taken_is_left_alone(project: Path, options: dict[str, Any]) -> None:
    taken = options["out"] / "models"
    taken.mkdir(parents=True)
    (taken / "precious").touch()
    with pytest.raises(slipway.ArtifactError) as caught:
        slipway.export(project / "run", **options, settings={"output.naming_pattern": "models"})
    assert caught.value.reason == "OUTPUT_EXISTS"
    assert [path.name for path in taken.iterdir()] == ["precious"]


def test_a_coordinator_that_is_not_there_is_said(project: Path, options: dict[str, Any]) -> None:
    with pytest.raises(slipway.ServiceError) as caught:
        slipway.export(project / "run", **options, coordinator=f"127.0.0.1:{free_port()}")
    assert caught.value.reason == "COORDINATOR_UNAVAILABLE"
    assert caught.value.retryable


LIGHT = """
import sys
import slipway
try:
    slipway.export(sys.argv[1], base=sys.argv[2], out=sys.argv[3])
except slipway.ServiceError as error:
    print(error.reason, error.remedy)
"""


def test_without_its_libraries_it_says_what_to_install(project: Path, tmp_path: Path) -> None:
    light = with_extras_hidden(tmp_path)
    words = [sys.executable, "-c", LIGHT, *map(str, (project / "run", project / "base", tmp_path / "out"))]
    done = subprocess.run(words, env=light.environment, capture_output=True, text=True)
    said = "UNSUPPORTED pip install 'slipway-ml[all]', or name a coordinator: --coordinator HOST:PORT\n"
    assert (done.stdout, done.stderr) == (said, "")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("error", "raised"),
    [(PermissionError(13, "of the program"), PermissionError), (StopIteration("at the end"), RuntimeError)],
)
def test_an_error_of_the_programs_function_is_raised_as_it_is(
    project: Path, options: dict[str, Any], error: Exception, raised: type[Exception], asynchronous: bool
) -> None:
    """Also one of a kind that files raise; only StopIteration, which no coroutine can raise, is the cause of another."""

    def fail(progress: slipway.ExportProgress) -> None:
        if progress.note.startswith("reading"):
            raise error

    async def export_within_time() -> slipway.ExportResult:
        return await asyncio.wait_for(slipway.export_async(project / "run", **options, progress=fail), 120)

    def export() -> slipway.ExportResult:
        if asynchronous:
            return asyncio.run(export_within_time())
        return slipway.export(project / "run", **options, progress=fail)

    with pytest.raises(raised) as caught:
        export()
    assert error in (caught.value, caught.value.__cause__)


def test_a_plan_of_what_is_not_there_says_so(project: Path, options: dict[str, Any]) -> None:
    made = slipway.plan(project / "nowhere", **options)
    assert not made.possible
    assert repr(made).splitlines()[0] == "ExportPlan: the sources cannot be used"
    assert "impossible: [CHECKPOINT_NOT_FOUND]" in repr(made).splitlines()[2]
    with pytest.raises(slipway.ModelExportError, match="nowhere") as caught:
        made.require()
    assert caught.value.reason == "CHECKPOINT_NOT_FOUND"


def test_other_arguments_are_refused(project: Path) -> None:
    for call in (slipway.export, slipway.plan):
        with pytest.raises(TypeError, match="nonsense"):
            call(project / "run", nonsense=1)  # type: ignore[call-arg]  # the point
    for other in (slipway.export_async, slipway.plan_async):
        with pytest.raises(TypeError, match="nonsense"):
            asyncio.run(other(project / "run", nonsense=1))  # type: ignore[call-arg]  # the point


def test_the_asynchronous_functions_have_the_same_arguments() -> None:
    for call, options in ((slipway.export, calls.ExportOptions), (slipway.plan, calls.PlanOptions)):
        hints = typing.get_type_hints(call)
        names = list(inspect.signature(call).parameters)[1:]
        assert {name: hints[name] for name in names} == typing.get_type_hints(options)
    for call, other in ((slipway.recommend, slipway.recommend_async), (slipway.verify, slipway.verify_async)):
        assert inspect.signature(call) == inspect.signature(other)


def test_a_recommendation_is_that_of_the_command(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("recommend", "--target", "browser", "--model", project / "base", "--memory", "1GiB", "--json")
    assert run_here(*words) == 0
    printed = json.loads(capsys.readouterr().out)
    advice = slipway.recommend("browser", model=project / "base", memory="1GiB")
    assert json.loads(json.dumps(advice.to_json())) == printed
    assert asyncio.run(slipway.recommend_async("browser", model=project / "base", memory=1 << 30)) == advice
    first, second, third = repr(advice).splitlines()
    assert first.startswith(f"Recommendation: {advice.best.output} for browser, at most ")
    assert second == advice.best.why
    assert third.startswith("others that fit: onnx")
    assert "  formats:\n" in advice._repr_html_()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "reason", "part"),
    [
        ({"target": "toaster"}, "TARGET_UNKNOWN", "toaster"),
        ({"target": "browser", "memory": 5}, "PARAMS_INVALID", "model"),
        ({"target": "browser", "memory": "much"}, "CONFIGURATION_INVALID", "memory: "),
        ({"target": "browser", "model": "base", "memory": 5}, "TARGET_UNFIT", "nothing fits"),
        ({"target": "browser", "report": "base"}, "FILE_ERROR", "report.json"),
    ],
)
def test_what_cannot_be_recommended_is_a_typed_error(
    project: Path, arguments: dict[str, Any], reason: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    with pytest.raises(slipway.ModelExportError) as caught:
        slipway.recommend(**arguments)
    assert caught.value.reason == reason
    assert part in str(caught.value)


def test_a_folder_is_verified_whatever_the_machines_settings_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings are for artifacts in a store; ``~`` is the home in a path, as everywhere."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "text").write_text("a text")
    write_checksums(tmp_path / "folder", known={})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLIPWAY_COORDINATOR", "http://x")
    assert slipway.verify("~/folder").path == str(tmp_path / "folder")
    assert run_here("verify", tmp_path / "folder") == 0
    with pytest.raises(slipway.ConfigurationError, match="HOST:PORT"):
        slipway.verify(f"sha256:{'0' * 64}")


def test_a_home_is_meant_by_a_tilde(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "e.yaml").write_text(f"export: {{checkpoint: {{path: {project / 'run'}}}}}")
    made = slipway.plan(configuration="~/e.yaml", base=project / "base", out="~/out", home="~/home")
    assert made.loaded.configuration.checkpoint.path == str(project / "run")
    with pytest.raises(slipway.ModelExportError, match=f"{tmp_path}/nowhere"):
        slipway.recommend("browser", report="~/nowhere")


WAITING = """
import asyncio, sys, threading
import slipway

try:
    asyncio.run(asyncio.wait_for(slipway.verify_async("sha256:" + 64 * "0", coordinator=sys.argv[1], home=sys.argv[2]), 2))
except TimeoutError:
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("slipway")])
"""


def test_cancelling_waits_for_no_function_that_only_reads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        words = [sys.executable, "-c", WAITING, address, str(tmp_path / "home")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("['slipway-call']\n", "", 0)


def test_a_changed_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "text").write_text("a text")
    home = tmp_path / "home"
    with pytest.raises(slipway.ArtifactError) as caught:
        slipway.verify(tmp_path / "folder", home=home)
    assert caught.value.reason == "ARTIFACT_INVALID"
    write_checksums(tmp_path / "folder", known={})
    verified = slipway.verify(tmp_path / "folder", home=home)
    assert verified.files == 1
    lines = ["Verification: every checksum is right", "1 file compared", str(tmp_path / "folder")]
    assert repr(verified).splitlines() == lines
    assert verified._repr_html_() == f"<pre>{verified!r}</pre>"
    assert asyncio.run(slipway.verify_async(tmp_path / "folder", home=home)).path == str(tmp_path / "folder")
    (tmp_path / "folder" / "text").write_text("another")
    with pytest.raises(slipway.ArtifactError, match="text") as caught:
        slipway.verify(tmp_path / "folder", home=home)
    assert caught.value.reason == "ARTIFACT_CORRUPT"
    with pytest.raises(slipway.ArtifactError) as caught:
        slipway.verify(f"sha256:{'0' * 64}", home=home)
    assert caught.value.reason == "ARTIFACT_NOT_FOUND"

"""Completion of words in a shell: bash is called as a terminal calls it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slipway.cli.completion import assignments, settings
from slipway.configuration.flags import options_of
from slipway.configuration.loading import load
from slipway.configuration.schema import keys, parse_text, usual_values, values
from slipway.formats.registry import formats
from support.commands.cli import SLIPWAY, environment

ASK = """
eval "$(_SLIPWAY_COMPLETE=source_bash slipway)"
for asked in "$@"; do
    IFS=$'\\t' read -ra COMP_WORDS <<< "$asked"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMPREPLY=()
    _slipway_completion slipway
    echo "${COMPREPLY[*]}"
done
"""


def offered(home: Path, *asked: list[str]) -> list[list[str]]:
    """Return bash's completions of the last word of each; bash splits words at equals signs and colons."""
    command = ["bash", "--norc", "-c", ASK, "bash", *("\t".join(["slipway", *words]) for words in asked)]
    installed = f"{Path(SLIPWAY).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, env=environment(home, PATH=installed), capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


SETTINGS: list[tuple[list[str], list[str]]] = [
    (
        ["export", "--set", "formats.onnx.op"],
        ["formats.onnx.opset_version=", "formats.onnx.optimize_graph=", "formats.onnx.optimization_times="],
    ),
    (["export", "--set", "recovery.p"], [f"recovery.profile={each}" for each in values("recovery.profile")]),
    (["export", "--set", "formats.onnx.enabled", "="], ["true", "false"]),
    (
        ["export", "--set", "formats.onnx.quantization", "=", "int8,i"],
        ["int8,int8_dynamic", "int8,int8_static", "int8,int4"],
    ),
    (["export", "--set", "=", "log.level", "=", "d"], ["debug"]),
    (["export", "-f", "ten"], ["tensorrt", "tensorrt_llm"]),
    (["export", "run", "-f", "gguf", ":"], [*options_of(formats()["gguf"])]),
    (["export", "-f", "onnx", ":", "none+int8_d"], ["none+int8_dynamic"]),
    (["submit", "--formats", "onnx", ":", "int8,GGUF", ":", "q8"], ["q8_0"]),
    (["export", "-f", "onnx", ":", "int8,op"], ["int8,openvino"]),
    (["export", "-f", "onnx", ":", "int4+save"], []),
    (["export", "-f", "tensorrt", ":", "builder", "=", "tensorrt_"], ["tensorrt_rtx"]),
    (["export", "-f", "adapter", ":", "targets", "=", "g"], ["gguf"]),
    (["recommend", "--target", "o"], ["ollama"]),
    (["export", "--coordinator", "localhost", ":", "7070", "--target", "ed"], ["edge"]),
]


@pytest.mark.slow
def test_bash_completes_settings_and_their_values(tmp_path: Path) -> None:
    found = offered(tmp_path, *(words for words, _ in SETTINGS))
    assert found == [expected for _, expected in SETTINGS]


OTHERS: list[tuple[list[str], list[str]]] = [
    (["stage", "onnx_export", "--param", "en"], ["engine=auto", "engine=mobius", "engine=dynamo", "engine=legacy"]),
    (["stage", "onnx_export", "--out", "x", "--param", "engine", "=", "m"], ["mobius"]),
    (["stage", "nonesuch", "--param", "e"], []),
    (["stage", "merge", "--input", "ad"], ["adapter="]),
    (["stage", "nonesuch", "--input", "ad"], []),
    (["export", "--ea"], ["--each"]),
    (["export", "--each", "sw"], []),  # then bash itself completes names of folders
    (["coordinator", "--lea"], ["--lease-seconds"]),
    (["coordinator", "mig"], ["migrate"]),
    (["worker", "--coordinator", "x:1", "--log-format", "=", "j"], ["json"]),
    (["worker", "--sl"], ["--slots"]),
]


def test_bash_completes_what_a_stage_and_a_service_take(tmp_path: Path) -> None:
    found = offered(tmp_path, *(words for words, _ in OTHERS))
    assert found == [expected for _, expected in OTHERS]


def test_every_setting_is_offered() -> None:
    assert settings("") == [f"{key}=" for key in keys()]


def test_a_whole_word_is_completed_where_the_shell_keeps_it_whole() -> None:
    def ask(word: str) -> list[str]:
        return assignments(word, tuple(keys()), usual_values, {})

    assert ask("formats.tensorrt.builder=tensorrt_") == ["formats.tensorrt.builder=tensorrt_rtx"]
    assert ask("optimization.group_size=1") == ["optimization.group_size=16", "optimization.group_size=128"]
    assert ask("nonesuch=") == ask("nonesuch") == []


def test_every_value_that_is_offered_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with_values = [key for key in keys() if usual_values(key)]
    assert len(with_values) > 50
    for key in with_values:
        check_values(key, tmp_path)


def check_values(key: str, tmp_path: Path) -> None:
    """Check that every value that is offered for a key is taken."""
    beside = ["base_model.load_in_4bit=true"] if key == "base_model.merge_onto" else []
    beside += ["optimization.method=auto"] if key == "optimization.symmetric" else []
    beside += ["optimization.quantization=int8"] if key.endswith(".unquantized") else []
    beside += (
        [f"{key.removesuffix('quantization')}enabled=true"]
        if key.startswith("formats.") and key.endswith(".quantization")
        else []
    )
    for value in usual_values(key):
        parse_text(key, value)
        if (key, value) in {("optimization.remove_artifacts", "false")}:  # refused with what to do instead
            continue
        more = [
            f"formats.{name}.enabled={str(value in (*each.levels, each.quantization.unquantized, 'none')).lower()}"
            for name, each in formats().items()
            if key == "optimization.quantization" and each.levels
        ]
        load(
            None, environment={}, flags={"--checkpoint": str(tmp_path)}, assignments=[*beside, *more, f"{key}={value}"]
        )

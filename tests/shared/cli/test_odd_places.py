"""Commands in unusual surroundings: odd names of folders, addresses instead of folders, terminals, little memory."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from slipway.artifacts.manifest import Manifest, ManifestFile
from slipway.configuration import load
from slipway.embedded.coordinator import Embedded
from slipway.errors import ArtifactError, ConfigurationError
from slipway.execution.failures import failure_of, failure_of_exit
from slipway.machine.known_faults import translate_fault
from slipway.settings import Settings
from slipway_coordinator.storage.database_access import state_at
from slipway_coordinator.storage.state_file import read_exports
from support.commands.cli import SLIPWAY, Done, environment, run_here, slipway
from support.coordinators.harness import DIGEST

ODD = "a#b?mode=memory&c=%41%2F d"


def test_a_state_lies_where_its_path_says(tmp_path: Path) -> None:
    folder = tmp_path / ODD
    folder.mkdir()
    path = sa.make_url(state_at(str(folder / "state.db")).url).database
    assert path == str(folder / "state.db")


def test_a_home_with_signs_of_an_address_is_used_and_nothing_beside_it(tmp_path: Path) -> None:
    from slipway.configuration import ExportConfiguration

    home = tmp_path / ODD
    settings = Settings(home=home, scratch=home / "scratch")
    with Embedded(settings, "x") as embedded:
        assert (home / "exports" / "x" / "state.db").stat().st_size > 0
        sources = {"base": DIGEST, "adapter": DIGEST}
        embedded.client.create_export(ExportConfiguration(), sources=sources, export_id="x")
    (found,) = read_exports(home / "exports" / "x" / "state.db")
    assert dict(found.sources) == sources
    assert [path.name for path in tmp_path.iterdir()] == [ODD]


@pytest.mark.parametrize("address", ["s3://bucket/prefix", "S3://bucket", "gs://bucket/x", "file:///tmp/x", "hf://a/b"])
def test_an_address_is_no_output_directory(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "export.yaml").write_text(f"export: {{checkpoint: {{path: run}}, output: {{directory: '{address}'}}}}")
    sources: list[Callable[[], object]] = [
        lambda: load(tmp_path / "export.yaml", environment={}),
        lambda: load(None, environment={"EXPORT_OUTPUT_DIR": address}, flags={"--checkpoint": "run"}),
        lambda: load(None, environment={}, assignments=["checkpoint.path=run", f"output.directory={address}"]),
    ]
    for read in sources:
        with pytest.raises(ConfigurationError, match=address):
            read()
    for name in ("SLIPWAY_HOME", "SLIPWAY_SCRATCH"):
        with pytest.raises(ConfigurationError, match=name):
            Settings.from_environment({name: address})


@pytest.mark.parametrize(
    "words",
    [
        ("pull", f"sha256:{'0' * 64}", "s3://bucket/x"),
        ("stage", "support.stages.plain:ECHO", "--input", "in=.", "--param", "text=x", "--out", "s3://bucket/x"),
        ("sample", "s3://bucket/x"),
    ],
    ids=["pull", "stage", "sample"],
)
def test_an_address_is_no_folder_to_write_to(
    tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    assert run_here(*words, "--json") == 3
    assert "CONFIGURATION_INVALID" in capfd.readouterr().out
    assert not (tmp_path / "s3:").exists()


@pytest.mark.parametrize(
    "paths",
    [
        ("Model.json", "model.json"),
        ("straße", "STRASSE"),
        ("É/x", "e\u0301/x"),
        ("a/x", "A/y"),
        ("a", "A/b"),
        ("\ufb01le", "FILE"),
    ],
)
def test_names_that_differ_only_by_case_are_refused(paths: tuple[str, str]) -> None:
    for order in (paths, paths[::-1]):
        with pytest.raises(ArtifactError) as raised:
            Manifest.of(ManifestFile(path, 0, DIGEST, "x") for path in order)
        assert raised.value.reason == "ARTIFACT_INVALID"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_a_terminal_that_cannot_show_a_name_fails_nothing(tmp_path: Path, encoding: str) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff-\xe2\x80\x93"))
    (folder / "checkpoint-1").mkdir(parents=True)
    for words in (("checkpoints", folder, "--json"), ("push", folder, "--json")):
        done = slipway(*words, home=tmp_path / "home", PYTHONIOENCODING=encoding, LC_ALL="C")
        assert "INTERNAL" not in done.out + done.err
        assert done.code in {0, 3}
        assert done.json


@pytest.mark.parametrize(
    ("name", "text"),
    [("COLUMNS", "²"), ("COLUMNS", "9" * 5000), ("COLUMNS", "0"), ("LINES", "²"), ("TERMINAL_WIDTH", "x")],
)
def test_what_is_no_size_of_a_terminal_fails_nothing(tmp_path: Path, name: str, text: str) -> None:
    for words in (("list",), ("list", "--help")):
        done = slipway(*words, home=tmp_path, **{name: text})
        assert done.code == 0, done.err
        assert all(len(line) > 5 or not line.strip() for line in done.out.splitlines()), done.out


def test_a_stage_prints_and_reads_utf_8_whatever_the_terminal_is(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "text.txt").write_text("–", encoding="utf-8")
    words = (
        "stage",
        "support.stages.plain:SPEAK",
        "--input",
        f"in={tmp_path / 'in'}",
        "--out",
        tmp_path / "out",
        "--json",
    )
    variables = {"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = slipway(*words, home=tmp_path / "home", **variables)
    assert done.code == 0, done.out


def limited(*words: str | Path, home: Path, mega_bytes: int) -> Done:
    """Run the command with limited address space."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mega_bytes << 20, mega_bytes << 20))

    done = subprocess.run(
        [SLIPWAY, *map(str, words)],
        env=environment(home),
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_too_little_memory_has_a_reason_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "weights").write_bytes(bytes(1000))
    codes = set()
    for mega_bytes in (60, 150):  # with less, the interpreter itself crashes
        done = limited("push", tmp_path / "folder", home=tmp_path / "home", mega_bytes=mega_bytes)
        codes.add(done.code)
        assert "Traceback" not in done.err
        assert done.code in {0, 5}, done.err
        assert ("OUT_OF_MEMORY" in done.err) is (done.code == 5)
    assert 5 in codes


def test_an_export_that_does_not_fit_into_its_address_space_says_so(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom slipway.embedded.coordinator import Embedded\nfrom slipway.settings import Settings\n"
        "from slipway.cli.boundary import outcome\nhome = Path(sys.argv[1])\n"
        "sys.exit(outcome(lambda _: Embedded(Settings(home=home, scratch=home), 'x').__enter__()))"
    )
    done = subprocess.run(
        [
            "/bin/sh",
            "-c",
            'ulimit -v 900000; exec "$@"',
            "sh",
            Path(SLIPWAY).with_name("python"),
            "-c",
            script,
            tmp_path,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, "OUT_OF_MEMORY" in done.stderr) == (5, True), done.stderr
    assert "ulimit -v" in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        ImportError("libx.so: failed to map segment from shared object"),
    ],
)
def test_memory_has_many_words_and_one_reason(error: Exception) -> None:
    assert failure_of(error, stage="merge").reason == "OUT_OF_MEMORY"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.25 GiB",
        "CUDA error: out of memory",
        "CUDA failure 2: out of memory ; GPU=0 ; hostname=node",
        "[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)",
        "Cuda Error in nvinfer1::internal::DefaultAllocator::allocate: 2 (out of memory)",
        "[virtualMemoryBuffer.cpp::resizePhysical::160] Error Code 2: OutOfMemory (no further information)",
        "CUDA initialization failure with error: 2. Please check your CUDA installation",
        "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_gpu_s_memory_has_a_reason_of_its_own(text: str) -> None:
    """More threads or memory of the machine would not help."""
    outer = LookupError("no result")
    outer.__cause__ = RuntimeError(text)
    for found in (
        failure_of(RuntimeError(text), stage="validate"),
        failure_of(outer, stage="validate"),
        failure_of_exit(1, stage="validate", oom_killed=False, output=text),
    ):
        assert found.reason == "GPU_OUT_OF_MEMORY", found
        assert "nvidia-smi" in found.remedy
    known = translate_fault(RuntimeError(text))
    assert known is not None
    assert known.reason == "GPU_OUT_OF_MEMORY"


@pytest.mark.parametrize(
    "text",
    [
        "cuda is not available, and the machine is out of reach",
        "out of memory on a machine with CUDA",
        "CUDA initialization failure with error: 35",
    ],
)
def test_a_message_that_only_names_cuda_is_not_about_its_memory(text: str) -> None:
    assert failure_of(RuntimeError(text), stage="merge").reason != "GPU_OUT_OF_MEMORY"


@pytest.mark.parametrize(
    ("returncode", "output", "reason"),
    [
        (1, "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.", "OUT_OF_MEMORY"),
        (1, "MemoryError", "OUT_OF_MEMORY"),
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'", "OUT_OF_MEMORY"),
        (-15, "MemoryError", "STAGE_KILLED"),
        (1, "", "STAGE_ERROR"),
        (-40, "", "STAGE_KILLED"),  # a real-time signal, which has no name
        (-40, "MemoryError", "STAGE_KILLED"),
    ],
)
def test_the_last_words_of_a_process_tell_of_memory(returncode: int, output: str, reason: str) -> None:
    assert failure_of_exit(returncode, stage="merge", oom_killed=False, output=output).reason == reason

"""Every format through a coordinator: one worker has the stages that all formats share, another one only the format's, with its extra."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.cluster.cluster import Cluster
from support.commands.cli import Done, slipway
from support.commands.light_install import with_extras_hidden
from support.servers.postgres_server import PostgresServer
from support.servers.s3_server import S3Server

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

SHARED = "merge,quantize,onnx_export,calibration_data,importance,reference,validate"


@dataclass(frozen=True)
class Case:
    """An export of one format.

    Attributes:
        stage: Kind of work that makes the outputs.
        outputs: Those that are asked for.
        settings: Beyond the format itself.
        libraries: Modules without which no output is made or run here.
        status: What the validation says of each output.
        format: The format; empty: named like the stage.
        before: Stages of other formats that go before, for which there is another worker.
        extra: The extra of the stage, which is all that its worker has, but for the client of the bucket; empty: named like the stage.
        varying: Files that no two runs make alike.
    """

    stage: str
    outputs: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    status: str = "passed"
    format: str = ""
    before: str = ""
    extra: str = ""
    varying: tuple[str, ...] = ()

    def words(self) -> list[str]:
        settings = {
            "formats.pytorch.enabled": "false",
            "formats.onnx.enabled": "false",
            f"formats.{self.format or self.stage}.enabled": "true",
            "optimization.quantization": "none",
            "validation.benchmark_performance": "false",
            "validation.test_samples": "2",
            **self.settings,
        }
        return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


CASES = (
    Case("adapter", ("adapter", "adapter-onnx"), {"formats.adapter.targets": "peft,onnx"}),
    Case("gguf", ("gguf", "gguf-q8_0", "gguf-q4_k_m"), {"formats.gguf.quantization": "q8_0,q4_k_m"}, ("gguf", "xllamacpp")),
    Case("gguf_adapter", ("adapter-gguf",), {"formats.adapter.targets": "gguf"}, ("gguf", "xllamacpp"), format="adapter", before="adapter", extra="gguf"),
    Case("torchscript", ("torchscript", "torchscript-bf16"), {"formats.torchscript.quantization": "bf16"}),
    Case("torch_export", ("torch_export", "torch_export-bf16"), {"formats.torch_export.quantization": "bf16"}, extra="torchscript"),
    Case("openvino", ("openvino", "openvino-int8"), {"formats.openvino.quantization": "int8"}, ("openvino", "openvino_tokenizers")),
    Case("executorch", ("executorch", "executorch-8da4w"), {"formats.executorch.quantization": "8da4w"}, ("executorch",)),
    Case("litert", ("litert", "litert-int8"), {"formats.litert.quantization": "int8"}, ("litert_torch", "ai_edge_litert")),
    Case("coreml", ("coreml", "coreml-int8"), {"formats.coreml.quantization": "int8"}, ("coremltools",), "not_run"),
    Case("tensorrt_build", ("tensorrt",), {"formats.tensorrt.targets": "sm89"}, ("tensorrt_rtx",), "not_run", format="tensorrt", varying=("model.sm89.engine", "engine.json")),
    Case("tensorrt_llm", ("tensorrt_llm",), {"formats.tensorrt_llm.tp": "2", "formats.tensorrt_llm.pp": "2"}, ("ml_dtypes",), "not_run"),
)  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer, s3: S3Server) -> Iterator[Cluster]:
    """A cluster with one worker, which has no stage of a format."""
    folder = tmp_path_factory.mktemp("formats")
    with Cluster(folder, postgres, s3, tiny=False, workers=0, lease_seconds=20) as cluster, ExitStack() as stack:
        stack.callback(cluster.worker("shared", cluster.service.address, stages=SHARED).stop)
        yield cluster


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of the embedded exports, which share what they make alike."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.parametrize("case", CASES, ids=[case.stage for case in CASES])
def test_a_worker_with_only_its_stage_makes_the_same_bytes(
    case: Case, shared: Cluster, sample: Path, home: Path, tmp_path: Path
) -> None:
    for library in case.libraries:
        if find_spec(library) is None:  # not imported: that would start threads in this process
            pytest.skip(f"{library} is not installed")
    words = ["export", "--json", "--base-model", sample / "qwen3-base", "--checkpoint", sample / "qwen3-finetuned"]
    words += case.words()
    alone = delivered(slipway(*words, "--out", tmp_path / "alone", home=home, timeout=800), case)
    environment = shared.environment("command")
    words += ["--out", tmp_path / "together", "--coordinator", shared.service.address]
    (tmp_path / "extra").mkdir()
    light = with_extras_hidden(tmp_path / "extra", case.extra or case.stage, "s3")
    path = light.environment["PYTHONPATH"]
    own = shared.worker(f"only-{case.stage}", shared.service.address, stages=case.stage, PYTHONPATH=path)
    before = shared.worker(f"before-{case.stage}", shared.service.address, stages=case.before) if case.before else None
    try:
        done = slipway(*words, home=Path(environment.pop("SLIPWAY_HOME")), timeout=800, **environment)
        together = delivered(done, case, logs=shared.logs())
        ran = workers_of(shared, done.json["export_id"])
    finally:
        own.stop()
        if before:
            before.stop()
    assert ran.pop(case.stage) == {own.name}
    assert before is None or ran.pop(case.before) == {before.name}
    assert set.union(*ran.values()) == {"shared"}
    assert together == alone, "bytes do not depend on the process, the threads or the time"


def delivered(done: Done, case: Case, *, logs: str = "") -> dict[str, dict[str, str]]:
    """Check that every output has its status, in the report too; return the digests of its files, as they were fetched."""
    assert done.code == 0, done.err[-3000:] + logs
    folder = Path(done.json["output_directory"])
    assert slipway("verify", folder, home=folder.parent.parent / "verifying").code == 0
    assert {name: each["status"] for name, each in done.json["formats"].items()} == dict.fromkeys(
        case.outputs, case.status
    )
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    rows = {each["name"]: each for each in report["validation"]["outputs"]}
    assert {name: each["status"] for name, each in rows.items()} == dict.fromkeys(case.outputs, case.status)
    assert case.status != "passed" or all(each["to_reference"]["mean_kl"] is not None for each in rows.values())
    lines = [line.split("  ", 1) for line in (folder / "MANIFEST.sha256").read_text().splitlines()]
    digests = {name: {path: digest for digest, path in lines if path.startswith(f"{name}/")} for name in case.outputs}
    assert all(digests.values())
    for name in case.outputs:
        for file in case.varying:
            del digests[name][f"{name}/{file}"]
    return digests


def workers_of(cluster: Cluster, export: str) -> dict[str, set[str]]:
    """Return the workers that ran each stage; what an earlier export made is not made again."""
    ran: dict[str, set[str]] = {}
    for task in cluster.client.get_export(export).tasks:
        for attempt in task.attempts:
            if not attempt.reused:
                member = cluster.running_on(attempt.worker)
                ran.setdefault(task.stage, set()).add(member.name if member else attempt.worker)
    return ran

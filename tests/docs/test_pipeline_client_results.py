"""What the client of the examples of pipelines makes of exports that ended, at a coordinator with a worker of tiny stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from slipway.security.server import ServerSecurity
from support.commands.pipeline_client import load_client
from support.coordinators.harness import Harness, tiny_export, tiny_task

http = load_client()
NUMBERS = count()


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A coordinator and a worker with tiny stages, open to everybody."""
    security = ServerSecurity(http_address="127.0.0.1:0")
    with Harness(tmp_path_factory.mktemp("tiny"), security=security) as harness:
        yield harness


def ended(harness: Harness, *tasks: Any, **settings: Any) -> Any:
    """Run an export of tiny tasks; return the client's errors and outputs of it."""
    export = tiny_export(f"e{next(NUMBERS)}", *tasks, base=harness.base(), **settings)
    return http.Slipway(f"http://127.0.0.1:{harness.server.http_port}", patience_seconds=0, tell=lambda _: None).wait(
        harness.submit(export)
    )


def test_outputs_have_digests_sizes_and_verdicts(harness: Harness) -> None:
    found = {"pytorch": {"status": "passed", "mean_kl": 1e-7, "top1_agreement": 1.0}}
    facts = {"outputs": found, "failed_outputs": []}
    outputs = ended(harness, tiny_task("pytorch"), tiny_task("gguf"), tiny_task("validation", facts=facts))
    assert set(outputs) == {"pytorch", "gguf"}
    one, other = outputs["pytorch"], outputs["gguf"]
    assert one.digest.startswith("sha256:")
    assert one.digest != other.digest
    assert one.size_bytes == len("pytorch(base)")
    assert (one.verdict, one.mean_kl, one.top1_agreement) == ("passed", 1e-7, 1.0)
    assert (other.verdict, other.mean_kl) == ("not_validated", None)


def test_a_failed_export_raises_its_reason(harness: Harness) -> None:
    with pytest.raises(http.SlipwayError, match=r"INPUT_MISSING: .*bad fails") as caught:
        ended(harness, tiny_task("bad", fail="INPUT_MISSING"))
    assert (caught.value.reason, caught.value.retryable) == ("INPUT_MISSING", False)


def test_an_output_that_differs_is_a_failure_unless_it_is_kept(harness: Harness) -> None:
    found = {"failed_checks": 2, "explanation": "a scale is wrong", "remedy": "take another level"}
    facts = {"outputs": {"onnx-int8": found}, "failed_outputs": ["onnx-int8"]}
    tasks = (tiny_task("onnx-int8"), tiny_task("validation", facts=facts))
    with pytest.raises(
        http.SlipwayError, match="onnx-int8 failed validation: a scale is wrong; take another level"
    ) as caught:
        ended(harness, *tasks)
    assert caught.value.reason == "VALIDATION_FAILED"
    kept = ended(harness, *tasks, validation={"on_failure": "keep"})
    assert set(kept) == {"onnx-int8"}
    # A fault of the merged model is excused by no setting.
    facts = {"outputs": {"pytorch": found}, "failed_outputs": ["pytorch"]}
    with pytest.raises(http.SlipwayError, match="VALIDATION_FAILED"):
        ended(harness, tiny_task("pytorch"), tiny_task("validation", facts=facts), validation={"on_failure": "keep"})

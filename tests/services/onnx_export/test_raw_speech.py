"""Graphs of a speech model that takes samples of sound compute what transformers computes, with sounds of different lengths in a batch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from onnxruntime import InferenceSession

from slipway.errors import ModelExportError
from slipway.results.report import write_report
from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE
from slipway_validate.runner.sampling.encoding import read_sound
from support.commands.report_parts import result
from support.commands.usage_examples import usage_examples
from support.models.family_models import make_family_model
from support.models.judged_families import save_raw_extractor
from support.models.onnx_models import Exported
from support.models.transformers_results import write_sound

LIMIT = 1e-4
STEPS = 8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_family_model("moonshine", tmp_path_factory.mktemp("moonshine"))
    save_raw_extractor(folder)
    return folder


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the graphs with the packages of all runtimes, and the facts."""
    ctx = Context(workdir=tmp_path_factory.mktemp("onnx"))
    params = OnnxExportParams(packaging=("genai", "transformers_js", "optimum", "triton"))
    return STAGE.run({"pytorch": source}, params, ctx)["onnx"], dict(ctx.facts)


def sounds(lengths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of sound with zeros behind the shorter ones, and their mask."""
    mask = (np.arange(max(lengths))[None] < np.array(lengths)[:, None]).astype(np.int64)
    return np.random.default_rng(3).standard_normal(mask.shape).astype(np.float32) * mask.astype(np.float32), mask


def run_graph(graph: Any, feed: dict[str, Any]) -> dict[str, Any]:
    names = [value.name for value in graph.get_outputs()]
    return dict(zip(names, graph.run(names, feed), strict=True))


def opened(folder: Path) -> Any:
    return transformers.MoonshineForConditionalGeneration.from_pretrained(folder).eval()


@pytest.mark.slow
def test_every_comparison_and_check_passes(written: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = written
    assert facts["parity"] == "passed"
    assert facts["parity_max_abs_diff"] < LIMIT
    assert set(facts["checks"].values()) == {"passed"}
    assert {path.name for path in folder.glob("*.onnx")} == {"encoder_model.onnx", "decoder_model.onnx"}


@pytest.mark.slow
def test_sounds_of_three_lengths_are_continued_with_a_cache(source: Path, written: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = written
    encoder, decoder = (InferenceSession(folder / f"{name}_model.onnx") for name in ("encoder", "decoder"))
    values, mask = sounds((9000, 4000, 6111))
    model = opened(source)
    encoded = run_graph(encoder, {"input_values": values, "attention_mask": mask})
    with torch.no_grad():
        wanted = model.get_encoder()(torch.from_numpy(values), attention_mask=torch.from_numpy(mask)).last_hidden_state
    assert np.abs(encoded["last_hidden_state"] - wanted.numpy()).max() < LIMIT
    crossed = {name: each for name, each in encoded.items() if name.startswith("present.")}
    cache = {name.replace("present.", "past_key_values."): each for name, each in crossed.items()}
    for value in decoder.get_inputs():
        if ".decoder." in value.name:
            cache[value.name] = np.zeros((3, value.shape[1], 0, value.shape[3]), np.float32)
    tokens, order = np.ones((3, 1), np.int64), [0, 1, 2]
    for step in range(STEPS):
        feed = {"input_ids": tokens[:, -1:], "encoder_attention_mask": mask[order], **cache}
        results = run_graph(decoder, feed)
        unmasked = run_graph(decoder, feed | {"encoder_attention_mask": np.ones_like(mask)})["logits"][:, -1]
        cache |= {
            name.replace("present.", "past_key_values."): each
            for name, each in results.items()
            if name.startswith("present.")
        }
        with torch.no_grad():
            wanted = model(
                torch.from_numpy(values[order]),
                attention_mask=torch.from_numpy(mask[order]),
                decoder_input_ids=torch.from_numpy(tokens),
            ).logits[:, -1]
        assert np.abs(results["logits"][:, -1] - wanted.numpy()).max() < LIMIT
        # The mask says where the shorter sounds end.
        rows = np.abs(unmasked - wanted.numpy()).max(axis=-1)
        assert [bool(row > 10 * LIMIT) for row in rows] == [place != 0 for place in order]
        tokens = np.concatenate([tokens, wanted.argmax(-1).numpy()[:, None]], axis=1)
        if step == 3:  # as a beam search does
            beam = [2, 0, 2]
            order, tokens = [order[row] for row in beam], tokens[beam]
            cache = {name: each[beam] for name, each in cache.items()}


@pytest.mark.slow
def test_the_example_transcribes_a_file_as_transformers_does(
    source: Path, written: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    sound = write_sound(tmp_path / "sound.wav", seconds=0.9)
    command = [sys.executable, "-P", str(written[0] / "example.py"), str(sound), "--max-new-tokens", "12"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values = torch.from_numpy(read_sound(sound, rate=16_000, longest=16_000))[None]
    said = opened(source).generate(values, max_new_tokens=12, do_sample=False)[0]
    text = transformers.AutoTokenizer.from_pretrained(source).decode(said, skip_special_tokens=True)
    assert text.strip()
    assert done.stdout.strip() == text.strip()


@pytest.mark.slow
def test_the_card_s_examples_transcribe_a_file_alike(
    source: Path, written: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(source, tmp_path / "pytorch")
    shutil.copytree(written[0], tmp_path / "onnx", ignore=shutil.ignore_patterns("triton"))
    write_report(tmp_path, result=result(None, ("pytorch", "onnx")))
    write_sound(tmp_path / "speech.wav", seconds=1.0)
    said = {}
    for name, code in usage_examples((tmp_path / "README.md").read_text()).items():
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said[name] = done.stdout.split()[:20]
    assert said["pytorch"] == said["onnx"] != []


@pytest.mark.slow
def test_runtimes_with_other_graphs_of_raw_sound_are_named(written: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = written
    packages = facts["packages"]
    assert packages["triton"] == "triton"
    assert 'name: "encoder_attention_mask"' in (folder / "triton" / "decoder_model" / "config.pbtxt").read_text()
    assert "runs decoders and Whisper" in packages["genai"]
    assert "no mask" in packages["transformers_js"]
    assert "optimum has other graphs" in packages["optimum"]
    assert not (folder / "optimum").exists()


@pytest.mark.parametrize("cache", [True, False])
def test_a_fixed_number_of_samples_is_refused(source: Path, export: Callable[..., Exported], *, cache: bool) -> None:
    with pytest.raises(ModelExportError, match="takes samples of sound, whose number differs") as caught:
        export(source, shapes="static", cache=cache)
    assert caught.value.reason == "SHAPES_UNSUPPORTED"

"""The model card's example for a GGUF file that makes vectors, or tokens of sound, gives what transformers gives."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
import torch
from tokenizers import Tokenizer

from slipway.model.sentences import load_pooling, pool
from slipway.model.tokens.sound import SOUND_CODECS, SoundCodec
from slipway.results.report import write_report
from support.commands.report_parts import result
from support.commands.usage_examples import usage_examples
from support.models.gguf_models import write_gguf
from support.models.gguf_readers import save_reader
from support.models.sentence_models import write_prompts
from support.models.sound_models import make_speaker


def shown(model: Path, root: Path) -> str:
    """Write the file and run the card's example, in a process of its own."""
    file, _ = write_gguf(model, root / "work", level="f32")
    shutil.copytree(file.parent, root / "gguf")
    write_report(root, result=result(None, ("gguf",)))
    code = usage_examples((root / "README.md").read_text())["gguf"]
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def computed(model: Any, folder: Path, text: str) -> Any:
    """Return the vector that transformers and the pooling give a text."""
    encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text)
    ids, mask = torch.tensor([encoded.ids]), torch.tensor([encoded.attention_mask])
    with torch.no_grad():
        output = model.float()(input_ids=ids, attention_mask=mask)
    pooling = load_pooling(folder)
    assert pooling is not None
    return pool(output.last_hidden_state, mask, pooling)[0]


@pytest.mark.parametrize("prompts", [{"query": "is it: ", "document": "a house: "}, {}], ids=["prompts", "none"])
def test_vectors_are_as_alike_as_those_of_transformers(prompts: dict[str, str], tmp_path: Path) -> None:
    model = save_reader("bert-mean", tmp_path / "model")
    write_prompts(tmp_path / "model", prompts)
    texts = (prompts.get("query", "") + "How old are you?", prompts.get("document", "") + "What is your age?")
    one, other = (computed(model, tmp_path / "model", text) for text in texts)
    expected = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
    assert float(shown(tmp_path / "model", tmp_path)) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("special", [False, True], ids=["added", "special"])
@pytest.mark.parametrize("codec", [SOUND_CODECS[0], SOUND_CODECS[2]], ids=lambda codec: codec.name)
def test_numbers_of_sound_are_those_of_transformers(codec: SoundCodec, special: bool, tmp_path: Path) -> None:
    model, first = make_speaker(codec, tmp_path / "model", special=special), -1024
    numbers = ast.literal_eval(shown(tmp_path / "model", tmp_path))
    ids = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).encode("Once upon a time").ids
    with torch.no_grad():
        made = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :]
    first += model.config.vocab_size
    assert numbers == [int(token) - first for token in made]

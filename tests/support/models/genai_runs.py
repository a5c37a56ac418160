"""Continue prompts by onnxruntime-genai, which loads a delivered folder as it lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def genai_library() -> Any:
    """Import onnxruntime-genai; skip the test without it."""
    with pytest.MonkeyPatch.context() as patch:  # it notes in the environment where it found onnxruntime
        patch.setenv("ORT_LIB_PATH", "")
        patch.delenv("ORT_LIB_PATH")
        return pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")


def genai_continuations(folder: Path, rows: list[list[int]], count: int) -> list[list[int]]:
    """Return the tokens after each row, at most so many; skip the test without the library."""
    og = genai_library()
    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    width = max(map(len, rows))
    params.set_search_options(max_length=width + count, batch_size=len(rows))
    generator = og.Generator(model, params)
    padding = json.loads((folder / "genai_config.json").read_text())["model"]["pad_token_id"]
    generator.append_tokens(np.array([row + [padding] * (width - len(row)) for row in rows], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    found = ([int(token) for token in generator.get_sequence(row)][width:] for row in range(len(rows)))
    return [until_the_end(tokens, folder) for tokens in found]


def genai_samples(folder: Path, prompt: list[int], *, rows: int, rounds: int) -> list[int]:
    """Return the first token after a prompt of so many rows and rounds, as the folder's configuration searches."""
    og = genai_library()
    model = og.Model(str(folder))
    found: list[int] = []
    for seed in range(rounds):
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(prompt) + 2, batch_size=rows, random_seed=seed)
        generator = og.Generator(model, params)
        generator.append_tokens(np.array([prompt] * rows, np.int32))
        generator.generate_next_token()
        found += [int(generator.get_sequence(row)[len(prompt)]) for row in range(rows)]
    return found


def until_the_end(tokens: list[int], folder: Path) -> list[int]:
    """Return the tokens before the first one that ends a text."""
    ends = json.loads((folder / "genai_config.json").read_text())["model"]["eos_token_id"]
    stop = next((index for index, token in enumerate(tokens) if token in np.atleast_1d(ends)), len(tokens))
    return tokens[:stop]

"""The package for optimum: its decoder computes what the folder's does, and optimum's own classes run it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.commands.optimum import NEEDS_OPTIMUM, run_optimum
from support.models.family_models import make_family_model
from support.models.onnx_models import Exported
from support.models.packaged_models import empty_cache, session
from support.models.table_models import ROWS, make_row


def test_a_decoder_takes_the_empty_cache_that_optimum_makes(
    export: Callable[..., Exported], family: Callable[[str], Path]
) -> None:
    """Heads of Qwen3 are 32 wide here, and optimum makes a cache of 64 / 4."""
    folder = export(family("qwen3-tied"), packaging=("optimum",)).folder
    (graph, run), (packaged, run_packaged) = (
        session(path) for path in (folder / "model.onnx", folder / "optimum" / "model.onnx")
    )
    ids = np.random.default_rng(0).integers(3, 128, (2, 5))
    feed = {
        "input_ids": ids,
        "attention_mask": np.ones((2, 5), np.int64),
        "position_ids": np.arange(5)[None].repeat(2, 0),
    }
    wanted = run({**feed, **empty_cache(graph, 2)})
    odd = {
        value.name: np.zeros((2, 4, 0, 16), np.float32)
        for value in packaged.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    found = run_packaged({**feed, **odd})
    np.testing.assert_array_equal(found["logits"], wanted["logits"])
    assert found["present.1.key"].shape == (2, 2, 5, 32)
    assert (folder / "optimum" / "model.onnx.data").samefile(folder / "model.onnx.data")


@NEEDS_OPTIMUM
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Marian, two vocabularies", "T5"])
def test_optimum_translates_as_transformers_does(tmp_path: Path, export: Callable[..., Exported], name: str) -> None:
    """Greedily and with beams, rows of different lengths. Beams of transformers 4.57 know one vocabulary only."""
    import torch
    import transformers

    source = make_row(next(row for row in ROWS if row.name == name), tmp_path / "model")
    folder = export(source, packaging=("optimum",), engine="legacy", opset=17).folder / "optimum"
    rows = {"input_ids": [[5, 6, 7, 8, 9, 2], [9, 10, 2, 1, 1, 1]], "attention_mask": [[1] * 6, [1] * 3 + [0] * 3]}
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(source).eval()
    for beams in (1,) if "two" in name else (1, 3):
        asked = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False}
        wanted = model.generate(**{key: torch.tensor(value) for key, value in rows.items()}, **asked).tolist()
        assert run_optimum("ORTModelForSeq2SeqLM", folder, rows, load={"use_merged": False}, **asked) == wanted
        assert len({token for row in wanted for token in row}) > 1


@NEEDS_OPTIMUM
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-tied", "gpt2"])
def test_optimum_continues_as_transformers_does(
    export: Callable[..., Exported], family: Callable[[str], Path], name: str
) -> None:
    """Rows with padding on the left."""
    import torch
    import transformers

    source = family(name)
    folder = export(source, packaging=("optimum",)).folder / "optimum"
    rows = {"input_ids": [[5, 9, 17, 4, 30, 8], [1, 1, 1, 7, 3, 21]], "attention_mask": [[1] * 6, [0] * 3 + [1] * 3]}
    asked = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 1}
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    wanted = model.generate(**{key: torch.tensor(value) for key, value in rows.items()}, **asked).tolist()
    assert run_optimum("ORTModelForCausalLM", folder, rows, **asked) == wanted


@NEEDS_OPTIMUM
@pytest.mark.slow
def test_optimum_classifies_as_transformers_does(tmp_path: Path, export: Callable[..., Exported]) -> None:
    import torch
    import transformers

    source = make_family_model("bert-classes", tmp_path / "model")
    folder = export(source, packaging=("optimum",), engine="legacy", opset=17).folder / "optimum"
    rows = {"input_ids": [[5, 6, 7, 8], [9, 10, 2, 1]], "attention_mask": [[1] * 4, [1, 1, 1, 0]]}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source).eval()
    with torch.no_grad():
        wanted = model(**{key: torch.tensor(value) for key, value in rows.items()}).logits
    found = run_optimum("ORTModelForSequenceClassification", folder, rows)["logits"]
    np.testing.assert_allclose(np.array(found), wanted.numpy(), atol=1e-5)

"""Programs for LiteRT of tiny models, stored with their weights, so that its interpreter is tested where its converter is not installed.

``python -m support.models.litert_programs`` in ``tests`` makes them again, with the extra ``litert``.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from slipway.stage import Context
from slipway_litert.params import LitertParams
from slipway_litert.stage import STAGE
from support.models.quantize_models import save_tiny
from support.models.table_models import ROWS, make_row

FOLDER = Path(__file__).with_name("litert")
PLACES, CALL = 12, 4
_SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 32,
}  # fmt: skip


def _make() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)
        sources = {
            "decoder": save_tiny(root / "source-decoder", **_SMALL),
            "classes": make_row(next(row for row in ROWS if row.name == "BERT, classes"), root / "source-classes"),
        }
        for name, source in sources.items():
            (root / name).mkdir()
            params = LitertParams(max_length=PLACES, call_length=CALL)
            made = STAGE.run({"pytorch": source}, params, Context(workdir=root / name))["litert"]
            (FOLDER / name).mkdir(parents=True)
            for file in (
                made / "model.tflite",
                made / "litert.json",
                source / "config.json",
                source / "model.safetensors",
            ):
                shutil.copy(file, FOLDER / name)


if __name__ == "__main__":
    _make()

"""A classifier trained on a base that is stored without its head merges to what peft merges to, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from slipway.models.families import model_family
from slipway.models.safetensors_file import read_weights
from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from support.models.headless_bases import HEADLESS, make_headless, trained_with_peft


def merged(base: Path, adapter: Path, root: Path, **params: object) -> tuple[Path, Context]:
    (root / "work").mkdir()
    ctx = Context(workdir=root / "work")
    return STAGE.run({"base": base, "adapter": adapter}, MergeParams(**params), ctx)["pytorch"], ctx


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", HEADLESS)
def test_it_equals_what_peft_saves(tmp_path, kind):
    base, adapter = make_headless(kind, tmp_path)
    output, ctx = merged(base, adapter, tmp_path, verify="full")
    reference = trained_with_peft(kind, base, adapter).merge_and_unload()
    reference.save_pretrained(tmp_path / "peft")
    ours, theirs = stored(output), stored(tmp_path / "peft")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=0, atol=1e-6), name
    print(kind, sum(torch.equal(ours[n], theirs[n]) for n in ours), len(ours))
    config, expected = (tf.AutoConfig.from_pretrained(folder).to_dict() for folder in (output, tmp_path / "peft"))
    print({k:(config.get(k),expected.get(k)) for k in config.keys()|expected.keys() if config.get(k)!=expected.get(k)})
    print(ctx.facts["verified"], ctx.facts.get("warnings"))

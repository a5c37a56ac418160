"""What outputs are measured with: PyTorch on their own weights, the noise of their arithmetic, and the cost of their level."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from slipway.model.configuration import ModelConfig
from slipway.model.families import auto_model
from slipway.model.safetensors_file import read_weights
from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_validate.folders import runtime_for
from slipway_validate.judging.compare import compare_windows, load_logits
from slipway_validate.judging.distances import COST_TIMES, FLOOR
from slipway_validate.judging.yardsticks import _passes, cost_pass, plan_yardsticks, read_measured, rounding_pass
from slipway_validate.protocol.messages import pass_file
from slipway_validate.reference.running import RUNTIME
from slipway_validate.runner.survival.checkpoints import Checkpoint
from slipway_validate.runner.yardsticks.computing import compute_yardsticks
from slipway_validate.runner.yardsticks.roundings import RoundedResults, input_rounding, weight_rounding
from slipway_validate.runner.yardsticks.weights import Products
from support.models.judged_families import make
from support.models.validated_here import Validated
from support.models.validation_models import Models, make_adapted, make_base, save_tokenizer


@pytest.mark.parametrize(
    ("name", "steps"), [("int8/32", 127), ("int8/256", 127), ("int8/row", 127), ("int8/tensor", 255)]
)
def test_inputs_are_rounded_by_at_most_half_a_step(name: str, steps: int) -> None:
    values = torch.randn(3, 80, generator=torch.Generator().manual_seed(1))
    rounded = input_rounding(name)(values)
    assert rounded.shape == values.shape
    assert 0 < (rounded - values).abs().max() <= 1.01 * (values.amax() - values.amin()) / steps
    assert not input_rounding(name)(torch.zeros(2, 80)).any()


def test_weights_are_rounded_in_groups_and_to_floats() -> None:
    values = torch.randn(4, 70, generator=torch.Generator().manual_seed(2))
    for group in range(0, 70, 32):
        part = values[:, group : group + 32]
        step = part.abs().amax(dim=1, keepdim=True) / 7
        assert ((weight_rounding("int4/32")(values)[:, group : group + 32] - part).abs() <= step / 2 + 1e-6).all()
    assert torch.equal(weight_rounding("bfloat16")(values), values.bfloat16().float())
    with pytest.raises(LookupError):
        input_rounding("int7/what")


@pytest.fixture(scope="module")
def graph(tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The merged model as the stage exports it, whose constants have the names of its weights."""
    work = tmp_path_factory.mktemp("graph")
    return EXPORT.run({"pytorch": tiny.merged}, OnnxExportParams(parity="never"), Context(workdir=work))["onnx"]


def test_pytorch_computes_with_what_an_output_stores(tiny: Models, graph: Path, tmp_path: Path) -> None:
    """A right graph stores the merged weights, so PyTorch on them is base + adapter; of another model's weights it is not."""
    run = Validated(tiny.base, tiny.adapter, tmp_path, merged=tiny.merged)
    inputs = {"base": tiny.base, "adapter": tiny.adapter}
    outputs = {"pytorch": tiny.merged, "onnx": graph, "onnx-int8": graph}
    spec = run.spec(RUNTIME, tiny.base)
    asked = plan_yardsticks(inputs, outputs, run.reference, spec, threads=1, logit_bytes=1 << 30)
    assert asked is not None
    assert [each.name for each in asked.passes] == ["onnx", "onnx-int8", rounding_pass("int8/32")]
    assert asked.windows == 4
    folder = tmp_path / "measured"
    folder.mkdir()
    compute_yardsticks(asked, folder, report=lambda *_: None)
    found = read_measured(folder, asked, run.reference)
    assert not found.missing
    twin = found.results("onnx")
    assert twin is not None
    assert (compare_windows(run.reference.logits[:4], twin, run.reference.measure).mean_kl or 0.0) < 1e-9
    assert 0 < (found.noise("int8/32") or 0.0) < 1e-2
    assert found.noise("") == found.cost("float32") == 0.0
    assert found.cost("int4") is None
    assert cost_pass("int4") not in found.figures


@pytest.mark.parametrize("name", ["marian", "bart", "whisper"])
@torch.no_grad()
def test_tables_of_positions_keep_their_own_lookup(name: str, tmp_path: Path) -> None:
    """They are asked for a shape, or for where it begins, and not for rows; the base computes with them what the merged model does."""
    model = make(name, tmp_path)
    merged = model.outputs()["pytorch"]
    family = ModelConfig.read(model.base).family
    assert family is not None
    base, wanted = (
        auto_model(family).from_pretrained(each, dtype=torch.float32).eval() for each in (model.base, merged)
    )
    random = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 60, (2, 7), generator=random)
    given = {"input_features": torch.randn(2, 16, 200, generator=random)} if name == "whisper" else {"input_ids": ids}
    table = base.model.decoder.embed_positions.weight
    before = base(**given, decoder_input_ids=ids).logits
    (whole := tmp_path / "whole").mkdir()  # with the tables that a checkpoint lacks because they are computed
    save_file({key: each.clone() for key, each in wanted.state_dict().items()}, whole / "model.safetensors")
    with Products(base).use_stored(Checkpoint(read_weights(whole))):
        found = base(**given, decoder_input_ids=ids).logits
    assert (found - wanted(**given, decoder_input_ids=ids).logits).abs().max() < 1e-5
    assert (found - before).abs().max() > 1e-2
    assert base.model.decoder.embed_positions.weight is table
    assert torch.equal(base(**given, decoder_input_ids=ids).logits, before)


def test_weights_that_are_not_understood_are_named_and_the_others_measured(
    tiny: Models, graph: Path, tmp_path: Path
) -> None:
    run = Validated(tiny.base, tiny.adapter, tmp_path, merged=tiny.merged)
    (strange := tmp_path / "strange").mkdir()
    (strange / "model.onnx").write_bytes(b"\x08")
    inputs, outputs = {"base": tiny.base, "adapter": tiny.adapter}, {"onnx": graph, "onnx-fp16": strange}
    spec = run.spec(RUNTIME, tiny.base)
    asked = plan_yardsticks(inputs, outputs, run.reference, spec, threads=1, logit_bytes=1 << 30)
    assert asked is not None
    folder = tmp_path / "measured"
    folder.mkdir()
    compute_yardsticks(asked, folder, report=lambda *_: None)
    found = read_measured(folder, asked, run.reference)
    assert set(found.missing) == {"onnx-fp16"}
    assert found.results("onnx") is not None
    assert not (folder / pass_file(rounding_pass("float16"))).exists()  # compared, and removed
    assert found.results("onnx-fp16") is None
    assert load_logits(folder / pass_file("onnx")).shape[0] == asked.windows
    assert read_measured(tmp_path, asked, run.reference).missing["onnx"] == "the process that computed it ended early"


def test_an_adapter_beside_a_graph_of_its_base_is_not_measured_with_the_graphs_weights_alone(tmp_path: Path) -> None:
    """ONNX Runtime runs it, from weights that are the base's: without the factors beside them they are another model."""
    (tmp_path / "model.onnx").touch()
    assert runtime_for("adapter-onnx", tmp_path) is runtime_for("onnx", tmp_path)
    assert not any(each.output for each in _passes({"adapter-onnx": tmp_path}, "float32"))
    assert [each.name for each in _passes({"onnx": tmp_path}, "float32") if each.output] == ["onnx"]


@torch.no_grad()
def test_only_embedding_and_head_are_rounded_as_such(tmp_path: Path) -> None:
    """A classifier has no head that makes tokens, and most layers no adapter: neither makes a layer one of the two."""
    model = make("bert-classes", tmp_path).base_module()
    products = Products(model)
    own = {name: layer.weight.clone() for name, layer in products.layers.items()}
    with products.use_rounded(model, torch.zeros_like, lambda values: values):
        ids = torch.tensor([[5, 9, 17]])
        results = model(ids).logits
    assert torch.equal(results, model.classifier.bias.expand_as(results))
    assert all(torch.equal(layer.weight, own[name]) for name, layer in products.layers.items())


def test_what_a_graph_in_16_bits_computes_is_rounded_but_not_what_a_norm_sums_up() -> None:
    values = torch.randn(3, 80, generator=torch.Generator().manual_seed(3)) * 100
    weight = torch.randn(40, 80, generator=torch.Generator().manual_seed(4))
    exact, mean = values @ weight.T, values.square().sum(-1, keepdim=True) * 1.5
    with RoundedResults("results/float16"):
        product, scaled = values @ weight.T, values.square().sum(-1, keepdim=True) * 1.5
        large = torch.full((2, 2), 1e6) * 2.0
        values[:, :1].add_(1.0)
    assert torch.equal(product, exact.half().float())
    assert not torch.equal(product, exact)
    assert torch.equal(scaled, mean)
    assert (large == torch.finfo(torch.float16).max).all()
    with RoundedResults("results/bfloat16"):
        assert torch.equal(values + 0.001, (values + 0.001).bfloat16().float())


def test_a_model_that_was_merged_in_bf16_and_stored_in_fp16_may_be_as_far_as_both_types_take_it(tmp_path: Path) -> None:
    """float16 is finer than the bfloat16 that the weights were merged in, of whose rounding it takes nothing back."""

    def adapted() -> PeftModel:
        return make_adapted(make_base().bfloat16().float())

    folders = {name: tmp_path / name for name in ("base", "merged", "fp16", "coarse")}
    adapted().save_pretrained(adapter := tmp_path / "adapter")
    coarse = adapted().merge_and_unload()
    for layer in coarse.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = weight_rounding("int8/32")(layer.weight.data)
    merged = adapted().merge_and_unload().bfloat16()
    models = make_base().bfloat16(), merged, deepcopy(merged).half(), coarse.half()
    for folder, model in zip(folders.values(), models, strict=True):
        model.save_pretrained(folder)
        save_tokenizer(folder)
    (work := tmp_path / "work").mkdir()
    run = Validated(folders["base"], adapter, work, merged=folders["merged"])
    measured = run.read_weights({"pytorch-fp16": folders["fp16"]})  # no output of this export is in bfloat16
    right = run.output("pytorch-fp16", folders["fp16"])
    assert (right.status, right.explanation) == ("passed", "")
    once = FLOOR + COST_TIMES * (measured.cost("bfloat16") or 0.0)
    of_one_type = run.output("pytorch-bf16", folders["merged"])
    limits = [check.limit for check in of_one_type.checks if (check.name, check.against) == ("mean_kl", "reference")]
    assert limits[0] == pytest.approx(once, rel=1e-3), "rounding to one type twice changes nothing more"
    wrong = run.output("pytorch-fp16", folders["coarse"])
    assert "further from the model than rounding its weights to their type explains" in wrong.explanation

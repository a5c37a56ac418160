"""What cannot be exported is refused with the reason that recovery rules and exit codes rely on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from slipway.errors import ModelExportError, ONNXExportError, TracerWarningError, UnorderedMapError
from slipway.model.configuration import ModelConfig
from slipway.stage import Context
from slipway_onnx_export.engines.failures import translate_capture_error, translate_tracer_error
from slipway_onnx_export.forms.components import components_of
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.parity.check import check_parity
from slipway_onnx_export.source import open_source
from slipway_onnx_export.stage import STAGE
from support.models.onnx_models import Exported
from support.models.table_models import ROWS, Row, make_row
from support.models.tiny_models import describe_a_layer_more, make_base


@pytest.fixture
def damaged(family: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a model for the test to damage."""
    return Path(shutil.copytree(family("qwen3"), tmp_path / "damaged"))


def _refusal(export: Callable[..., Exported], source: Path, **params: Any) -> ModelExportError:
    with pytest.raises(ModelExportError) as caught:
        export(source, **params)
    return caught.value


@pytest.mark.parametrize(
    ("params", "supported"),
    [
        ({"engine": "mobius", "opset": 26}, "14-24"),
        ({"engine": "mobius", "opset": 23, "runtime": "tensorrt"}, "14-20"),
        ({"engine": "dynamo", "opset": 17}, "18-23"),
        ({"engine": "dynamo", "opset": 26}, "18-23"),
        ({"engine": "legacy", "opset": 18}, "14-17"),
        ({"engine": "legacy", "opset": 13}, "14-17"),
    ],
    ids=str,
)
def test_opsets_an_engine_cannot_write(
    family: Callable[[str], Path], export: Callable[..., Exported], params: dict[str, Any], supported: str
) -> None:
    error = _refusal(export, family("qwen3"), **params)
    assert error.reason == "OPSET_UNSUPPORTED"
    assert error.about["engine"] == params["engine"]
    assert error.about["opset"] == str(params["opset"])
    assert error.about["supported_opsets"] == supported


def test_a_window_mobius_would_drop(family: Callable[[str], Path], export: Callable[..., Exported]) -> None:
    error = _refusal(export, family("mistral-window"), engine="mobius")
    assert error.reason == "EXPORT_ENGINE_UNSUPPORTED"
    assert error.about["engine"] == "mobius"
    assert "16" in error.message


def test_a_table_of_all_positions_is_not_written_where_it_is_large(
    damaged: Path, export: Callable[..., Exported]
) -> None:
    _edit_config(damaged, max_position_embeddings=1 << 24)
    error = _refusal(export, damaged, engine="mobius")
    assert error.reason == "EXPORT_ENGINE_UNSUPPORTED"
    assert "table of" in error.message


def test_a_window_too_long_to_prove(damaged: Path, export: Callable[..., Exported]) -> None:
    window = {"sliding_window": 4096, "layer_types": ["sliding_attention"] * 2, "max_position_embeddings": 8192}
    _edit_config(damaged, use_sliding_window=True, **window)
    error = _refusal(export, damaged, engine="mobius")
    assert error.reason == "EXPORT_ENGINE_UNSUPPORTED"
    assert "4096" in error.message


def test_graph_construction_knows_decoders_only(family: Callable[[str], Path], export: Callable[..., Exported]) -> None:
    error = _refusal(export, family("t5"), engine="mobius")
    assert error.reason == "EXPORT_ENGINE_UNSUPPORTED"
    assert "encoder-decoder" in error.message


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architectures": ["ViTModel"], "model_type": "vit", "image_size": 32}, "a ViTModel"),
        ({"architectures": ["T5Model"], "model_type": "t5", "is_encoder_decoder": True, "vocab_size": 9}, "T5Model"),
        (
            {"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma", "vision_config": {}},
            "a PaliGemmaForConditionalGeneration",
        ),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16}, "layers that keep a state"),
        ({"architectures": [], "model_type": "model-of-tomorrow"}, "model-of-tomorrow"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_models(damaged: Path, export: Callable[..., Exported], settings: dict[str, Any], named: str) -> None:
    _edit_config(damaged, **settings)
    error = _refusal(export, damaged, opset=8)  # before the opset is looked at
    assert error.reason == "FAMILY_UNSUPPORTED"
    assert named in error.message


def test_a_model_that_is_not_what_it_says(damaged: Path, export: Callable[..., Exported]) -> None:
    _edit_config(damaged, architectures=["ViTModel"], model_type="vit")
    error = _refusal(export, damaged)
    assert error.reason == "FAMILY_UNSUPPORTED"
    assert "ViTModel does not run as feature extraction models do" in error.message


def test_no_configuration(damaged: Path, export: Callable[..., Exported]) -> None:
    (damaged / "config.json").unlink()
    error = _refusal(export, damaged)
    assert (error.reason, error.about["file"]) == ("BASE_MODEL_INVALID", "config.json")


def test_configuration_that_is_not_json(damaged: Path, export: Callable[..., Exported]) -> None:
    (damaged / "config.json").write_text("{not json")
    assert _refusal(export, damaged).reason == "BASE_MODEL_INVALID"


def test_unknown_architecture(damaged: Path, export: Callable[..., Exported]) -> None:
    _edit_config(damaged, model_type="somebody_elses", architectures=["SomebodyElsesForCausalLM"])
    error = _refusal(export, damaged)
    assert (error.reason, error.about["model_type"]) == ("BASE_MODEL_INVALID", "somebody_elses")


def test_no_weights(damaged: Path, export: Callable[..., Exported]) -> None:
    (damaged / "model.safetensors").unlink()
    assert _refusal(export, damaged).reason == "BASE_MODEL_INVALID"


def test_pickled_weights(damaged: Path, export: Callable[..., Exported]) -> None:
    (damaged / "model.safetensors").rename(damaged / "pytorch_model.bin")
    assert _refusal(export, damaged).reason == "UNSAFE_PICKLE"


def test_truncated_weights(damaged: Path, export: Callable[..., Exported]) -> None:
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    error = _refusal(export, damaged)
    assert (error.reason, error.about["file"]) == ("SAFETENSORS_CORRUPT", "model.safetensors")


def test_shard_missing(damaged: Path, export: Callable[..., Exported]) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index))
    error = _refusal(export, damaged)
    assert (error.reason, error.about["shard"]) == ("BASE_MODEL_INVALID", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("engine", ["mobius", "legacy"])
def test_a_weight_missing(damaged: Path, export: Callable[..., Exported], engine: str) -> None:
    _edit_weights(damaged, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    error = _refusal(export, damaged, engine=engine)
    assert (error.reason, error.about["tensor"]) == ("BASE_MODEL_INVALID", "model.layers.1.mlp.up_proj.weight")


def test_a_weight_of_another_shape(damaged: Path, export: Callable[..., Exported]) -> None:
    def cut(weights: dict[str, Any]) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"][:32].clone()

    _edit_weights(damaged, cut)
    error = _refusal(export, damaged)
    assert (error.reason, error.about["tensor"]) == ("BASE_MODEL_INVALID", "model.norm.weight")


def test_not_a_number(damaged: Path, export: Callable[..., Exported]) -> None:
    def poison(weights: dict[str, Any]) -> None:
        weights["model.layers.0.mlp.down_proj.weight"][3, 4] = float("nan")

    _edit_weights(damaged, poison)
    error = _refusal(export, damaged)
    assert error.reason == "NON_FINITE_WEIGHTS"
    assert "down_proj" in error.about["tensor"]


def test_quantized_model(damaged: Path, export: Callable[..., Exported]) -> None:
    _edit_config(damaged, quantization_config={"quant_method": "compressed-tensors"})
    error = _refusal(export, damaged)
    assert (error.reason, error.about["key"]) == ("DTYPE_UNSUPPORTED", "quantization_config")


@pytest.mark.parametrize("phase", ["weights", "parity"])
def test_cancelled_between_tensors_or_calls(family: Callable[[str], Path], tmp_path: Path, phase: str) -> None:
    context = Context(workdir=tmp_path)
    seen: list[int] = []

    def cancel_at_third(progress: Any) -> None:
        if progress.phase == phase:
            seen.append(progress.done)
            if len(seen) == 3:
                context.cancelled.set()

    context.on_progress = cancel_at_third
    with pytest.raises(ModelExportError) as caught:
        STAGE.run({"pytorch": family("qwen3")}, OnnxExportParams(), context)
    assert caught.value.reason == "CANCELLED"
    assert len(seen) == 3


def test_a_branch_on_values_is_refused_by_the_legacy_tracer() -> None:
    """The warning comes from the real tracer, on a module that does what it warns of."""
    import warnings

    from slipway.model.graphs.branches import harmful_branches
    from slipway_onnx_export.engines.legacy import tracer_warning_error

    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.jit.trace(Branches(), torch.ones(2))
    error = tracer_warning_error(harmful_branches(caught), attention="eager")
    assert isinstance(error, TracerWarningError)
    assert error.reason == "TRACER_WARNING"
    assert error.about["file"] == Path(__file__).name
    assert error.about["kind"] == "python boolean"
    assert error.about["code"] == "return x * 2 if x.sum() > 0 else x"


@pytest.mark.parametrize("words", ["unordered_map::at", "invalid unordered_map<K, T> key"])
def test_the_tracers_lost_values_have_a_reason_of_their_own(family: Callable[[str], Path], words: str) -> None:
    from slipway_onnx_export.source import open_source

    error = translate_tracer_error(open_source(family("qwen3")), RuntimeError(words), attention="eager")
    assert isinstance(error, UnorderedMapError)
    assert error.reason == "UNORDERED_MAP"
    assert error.about["engine"] == "legacy"


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _edit_weights(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_model_that_describes_much_more_than_it_has_is_not_loaded(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    describe_a_layer_more(base)
    source = open_source(base)
    with pytest.raises(ONNXExportError, match="describes a model of") as caught:
        check_parity(source, tmp_path / "model.onnx", tolerance=1e-4)
    assert caught.value.reason == "BASE_MODEL_INVALID"


@pytest.mark.parametrize(
    "kind",
    ["Mamba", "FalconMamba", "Rwkv", "Jamba", "RecurrentGemma", "xLSTM", "MiniMax", "Zaya"],
)
def test_layers_that_keep_a_state_are_refused_from_the_configuration_alone(kind: str) -> None:
    import transformers

    from slipway_onnx_export.params import refusal_reason

    settings = getattr(transformers, f"{kind}Config")().to_dict() | {"architectures": [f"{kind}ForCausalLM"]}
    reason = refusal_reason(ModelConfig(settings))
    assert f"a decoder ({kind}ForCausalLM) with layers that keep a state" in reason
    assert ("forgets Mamba's state" in reason) is (kind in ("Mamba", "FalconMamba", "Jamba"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_families_of_the_table_are_not_refused(row: Row) -> None:
    import transformers

    from slipway_onnx_export.params import refusal_reason

    kind = getattr(transformers, row.model)
    assert not refusal_reason(ModelConfig(kind.config_class(**row.settings).to_dict() | {"architectures": [row.model]}))


@pytest.mark.parametrize("kind", ["cohere", "opt", "deepseek_v3"])
def test_what_mobius_builds_incorrectly_is_traced_at_once(tmp_path: Path, kind: str) -> None:
    from slipway_onnx_export.engines import choose_engine
    from slipway_onnx_export.engines.mobius import INCORRECT

    names = {"cohere": "Cohere", "opt": "OPT", "deepseek_v3": "DeepSeek-V3"}
    source = open_source(make_row(next(row for row in ROWS if row.name == names[kind]), tmp_path / "model"))
    assert choose_engine(source, OnnxExportParams()).name == "dynamo"
    assert choose_engine(source, OnnxExportParams(opset=17)).name == "legacy"
    assert kind in INCORRECT


class _Fixes(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(3.0)


class _BranchesOnValues(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class _Bessel(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x)


@pytest.mark.slow
def test_what_torch_export_cannot_trace_is_told_apart(family: Callable[[str], Path]) -> None:
    """The exceptions come from the real engine."""
    faults: tuple[tuple[torch.nn.Module, str, dict[str, str]], ...] = (
        (_Fixes(), "DYNAMIC_SHAPE", {"kind": "axis", "size": "3"}),
        (_BranchesOnValues(), "DYNAMIC_SHAPE", {"kind": "data", "code": "if x.sum() > 0:"}),
        (_Bessel(), "OPERATOR_UNSUPPORTED", {"operator": "prims.bessel_j0"}),
    )
    for module, reason, about in faults:
        error = None
        try:
            torch.onnx.export(
                module, (torch.ones(2, 3),), dynamo=True, dynamic_shapes=({0: "rows", 1: "columns"},), verbose=False
            )
        except Exception as raised:  # noqa: BLE001 - whatever the engine raises
            error = translate_capture_error(open_source(family("qwen3")), raised, attention="eager")
        assert error is not None
        assert error.reason == reason
        assert about.items() <= error.about.items()


def test_an_operator_that_the_legacy_tracer_lacks_is_named(family: Callable[[str], Path], tmp_path: Path) -> None:
    error = None
    try:
        torch.onnx.export(_Bessel(), (torch.ones(2, 3),), tmp_path / "x.onnx", dynamo=False, opset_version=14)
    except Exception as raised:  # noqa: BLE001 - whatever the engine raises
        error = translate_tracer_error(open_source(family("qwen3")), raised, attention="eager")
    assert error is not None
    assert (error.reason, error.about["operator"]) == ("OPERATOR_UNSUPPORTED", "aten::special_bessel_j0")


def test_a_translator_whose_configuration_names_no_first_token(tmp_path: Path) -> None:
    """Transformers 5 writes it into ``generation_config.json``, and its T5 has no such attribute."""
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    model.generation_config.decoder_start_token_id = 3
    model.save_pretrained(tmp_path)
    assert "decoder_start_token_id" not in json.loads((tmp_path / "config.json").read_text())
    source = open_source(tmp_path)
    assert source.start == 3
    assert [each.name for each in components_of(model, source)] == ["encoder_model", "decoder_model"]


def test_a_mistake_of_ours_is_no_unsupported_family(family: Callable[[str], Path]) -> None:
    source = open_source(family("qwen3"))
    with pytest.raises(AttributeError, match="forward"):
        components_of(SimpleNamespace(config=source.config), source)

"""The merged model computes what peft computes, for every form of LoRA this stage takes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
import transformers as tf
from peft import AdaLoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from slipway.errors import ModelMergeError
from support.models.merge_cases import SMALL, TOKENS, VOCAB, load, logits, make_model, randomise, save_case

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3-tied", {}),
    "llama": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "rslora": ("llama", {"use_rslora": True}),
    "rank-pattern": ("qwen3", {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6}}),
    "alpha-pattern": ("qwen3", {"alpha_pattern": {"q_proj": 3, "^model.layers.1.mlp.*": 24}}),
    "patterns-rslora": (
        "qwen3",
        {
            "use_rslora": True,
            "rank_pattern": {"k_proj": 3, ".*mlp.*": 5},
            "alpha_pattern": {"layers.0.*": 7, "1.mlp.*": 1},
        },
    ),
    "conv1d": ("gpt2", {"fan_in_fan_out": True}),
    "conv1d-square-only": ("gpt2", {"fan_in_fan_out": True, "target_modules": ["attn.c_proj"]}),
    "embedding": ("qwen3", {"target_modules": ["q_proj", "embed_tokens"]}),
    "scaled-embedding": ("gemma3", {"target_modules": ["q_proj"]}),
    "lm-head": ("qwen3", {"target_modules": ["q_proj", "lm_head"]}),
    "modules-to-save": ("qwen3", {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "norms-to-save": ("llama", {"modules_to_save": ["input_layernorm"]}),
    "regex-targets": ("llama", {"target_modules": r".*\.layers\.1\.self_attn\.(q|k)_proj"}),
    "layers-to-transform": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "excluded": ("llama", {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.0.self_attn.k_proj"]}),
    "gaussian-init": ("llama", {"init_lora_weights": "gaussian"}),
}


def assert_nearest(weight: torch.Tensor, exact: torch.Tensor, name: str) -> None:
    """No element is further from the exact value than the nearest representable one, save for float32's own error."""
    ours, nearest = (weight.double() - exact).abs(), (exact.to(weight.dtype).double() - exact).abs()
    assert (ours <= nearest + 2.0**-22 * exact.abs().max()).all(), f"{name}: off by {(ours - nearest).max():.3g}"


@pytest.mark.parametrize("form", FORMS)
def test_fp32_equals_peft(make_case, form):
    kind, lora = FORMS[form]
    case = make_case(kind, **lora)
    out, ctx = case.merge(verify="spot")
    reference = case.reference()
    unmerged = logits(reference)
    merged = logits(reference.merge_and_unload())
    ours = logits(load(out))
    base = logits(load(case.base))
    assert (base - unmerged).abs().max() > 1e-2, "the adapter must matter for this test to mean anything"
    assert (ours - merged).abs().max() < 1e-5
    assert (ours - unmerged).abs().max() < 1e-5
    assert ctx.facts["tensors_merged"] == len(ctx.facts["modules"])


@pytest.mark.parametrize("form", ["qwen3-tied", "patterns-rslora", "conv1d", "embedding", "modules-to-save"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(make_case, form, dtype):
    """Every weight is the representable value nearest to the exact one, so never further from it than peft's."""
    kind, lora = FORMS[form]
    case = make_case(kind, dtype, **lora)
    out, ctx = case.merge(verify="spot")
    exact = case.reference(torch.float64).double().merge_and_unload().state_dict()
    peft = case.reference().merge_and_unload().state_dict()
    ours = load(out).state_dict()
    assert ours.keys() == exact.keys()
    for name, weight in ours.items():
        assert weight.dtype == dtype
        assert_nearest(weight, exact[name], name)
        error = (weight.double() - exact[name]).abs().mean()
        assert error <= (peft[name].double() - exact[name]).abs().mean() * 1.001
    assert ctx.facts["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("target", "touched"), [("lm_head", "lm_head.weight"), ("embed_tokens", "model.embed_tokens.weight")]
)
def test_adapter_on_one_of_tied_weights_leaves_the_other(make_case, target, touched):
    """peft's merge changes both through the shared storage; the unmerged model is what was trained."""
    case = make_case("qwen3-tied", target_modules=["q_proj", target])
    out, ctx = case.merge(verify="spot")
    model = load(out)
    assert (logits(model) - logits(case.reference())).abs().max() < 1e-5
    base = load_file(case.base / "model.safetensors")["model.embed_tokens.weight"]
    weights = load_file(out / "model.safetensors")
    pair = {"lm_head.weight", "model.embed_tokens.weight"}
    (other,) = pair - {touched}
    assert torch.equal(weights[other], base)
    assert not torch.equal(weights[touched], base)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert ctx.facts["untied"] is True
    assert any("tie_word_embeddings" in warning for warning in ctx.facts["warnings"])


def test_gpt2_tied_head_is_untied_too(make_case):
    case = make_case("gpt2", target_modules=["c_attn", "lm_head"], fan_in_fan_out=True)
    out, _ = case.merge(verify="spot")
    assert (logits(load(out)) - logits(case.reference())).abs().max() < 1e-5


def test_untouched_ties_stay(make_case):
    case = make_case("qwen3-tied")
    out, ctx = case.merge(verify="spot")
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert ctx.facts["untied"] is False


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
def test_resized_vocabulary(make_case, kind):
    case = make_case(kind, resize=VOCAB + 5, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    out, _ = case.merge(verify="spot")
    model = load(out)
    assert model.config.vocab_size == VOCAB + 5
    weights = load_file(case.adapter / "adapter_model.safetensors")
    for module, ours in (
        ("model.embed_tokens", model.get_input_embeddings()),
        ("lm_head", model.get_output_embeddings()),
    ):
        assert torch.equal(ours.weight, weights[f"base_model.model.{module}.weight"])
        assert not torch.equal(ours.weight, weights[f"base_model.model.{module}.original_module.weight"])
    base = tf.AutoModelForCausalLM.from_pretrained(case.base)
    base.resize_token_embeddings(VOCAB + 5)
    reference = PeftModel.from_pretrained(base, case.adapter).eval()
    assert (logits(model) - logits(reference)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
def test_resized_vocabulary_saved_along(make_case, kind):
    """peft saves resized embeddings by itself when they were not trained; a tie that still holds is kept."""
    case = make_case(kind, resize=VOCAB + 5, target_modules=["q_proj"])
    out, ctx = case.merge(verify="spot")
    model = load(out)
    assert model.config.vocab_size == VOCAB + 5
    assert model.config.tie_word_embeddings is (kind == "qwen3-tied")
    assert ctx.facts["untied"] is False


@pytest.mark.parametrize("shard", ["12KB", "40KB"])
def test_sharded_base_and_output(make_case, shard):
    case = make_case("qwen3", shard=shard)
    assert (case.base / "model.safetensors.index.json").is_file()
    whole, _ = case.merge(verify="spot")
    assert (whole / "model.safetensors").is_file()
    expected = logits(case.reference().merge_and_unload())
    assert (logits(load(whole)) - expected).abs().max() < 1e-5
    case.workdir = case.workdir / "again"
    case.workdir.mkdir()
    out, _ = case.merge(max_shard_bytes=20_000)
    shards = sorted(path.name for path in out.glob("model-*.safetensors"))
    assert len(shards) > 2
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == shards
    assert torch.equal(logits(load(out)), logits(load(whole)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_asked_for_dtype(make_case, stored, dtype):
    case = make_case("llama", stored)
    out, ctx = case.merge(dtype=dtype)
    exact = case.reference(torch.float64).double().merge_and_unload().state_dict()
    model = load(out)
    assert model.dtype == getattr(torch, dtype)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert ctx.facts["dtype"] == dtype
    for name, weight in model.state_dict().items():
        assert_nearest(weight, exact[name], name)


def test_base_saved_from_the_bare_model(make_case, tmp_path):
    """GPT-2 on the hub has no ``transformer.`` prefix; the adapter has."""
    case = make_case("gpt2", fan_in_fan_out=True)
    bare = load(case.base).transformer
    headless = tmp_path / "headless"
    bare.save_pretrained(headless)
    config = json.loads((headless / "config.json").read_text())
    config["architectures"] = ["GPT2LMHeadModel"]
    (headless / "config.json").write_text(json.dumps(config))
    expected = logits(case.reference().merge_and_unload())
    case.base = headless
    out, _ = case.merge(verify="spot")
    assert "h.0.attn.c_attn.weight" in load_file(out / "model.safetensors")
    assert (logits(load(out)) - expected).abs().max() < 1e-5


FAMILIES: dict[str, tuple[Any, list[str]]] = {
    "t5": (
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
            )
        ),
        ["q", "v", "wi"],
    ),
    "bert": (
        lambda: tf.BertForSequenceClassification(
            tf.BertConfig(
                vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
            )
        ),
        ["query", "dense"],
    ),
    "phi3": (lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**SMALL, pad_token_id=0)), ["qkv_proj", "gate_up_proj"]),
    "qwen3-moe": (
        lambda: tf.Qwen3MoeForCausalLM(
            tf.Qwen3MoeConfig(**SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        ),
        ["q_proj", "o_proj"],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_need_no_table(tmp_path, family):
    build, targets = FAMILIES[family]
    torch.manual_seed(5)
    model = build().eval()
    case = save_case(tmp_path, model, target_modules=targets)
    out, _ = case.merge(verify="spot")
    cls = type(model)
    ours, info = cls.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    base = cls.from_pretrained(case.base).eval()
    inputs = {"input_ids": TOKENS, **({"decoder_input_ids": TOKENS} if family == "t5" else {})}
    with torch.no_grad():
        before = base(**inputs).logits
        tuned = PeftModel.from_pretrained(base, case.adapter).eval()(**inputs).logits
        merged = ours.eval()(**inputs).logits
    assert (before - tuned).abs().max() > 1e-3
    assert (merged - tuned).abs().max() < 1e-5


def test_weights_that_are_always_tied_are_refused(tmp_path):
    """T5 shares one embedding between encoder, decoder and head whatever its configuration says."""
    case = save_case(tmp_path, FAMILIES["t5"][0](), target_modules=["q", "lm_head"])
    with pytest.raises(ModelMergeError) as caught:
        case.merge(verify="spot")
    assert caught.value.reason == "ADAPTER_UNSUPPORTED"
    assert "lm_head.weight" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "touched"), [("lm_head", "lm_head.weight"), ("embed_tokens", "model.embed_tokens.weight")]
)
def test_a_form_on_one_of_tied_weights_leaves_the_other(make_case, target, touched):
    case = make_case("qwen3-tied", target_modules=["q_proj", target], use_dora=True)
    out, ctx = case.merge(verify="spot")
    model = load(out)
    assert (logits(model) - logits(case.reference())).abs().max() < 1e-5
    base = load_file(case.base / "model.safetensors")["model.embed_tokens.weight"]
    weights = load_file(out / "model.safetensors")
    (other,) = {"lm_head.weight", "model.embed_tokens.weight"} - {touched}
    assert torch.equal(weights[other], base)
    assert not torch.equal(weights[touched], base)
    assert ctx.facts["untied"] is True


def test_rows_that_a_tie_shares_keep_it(make_case):
    """peft gives the trained rows of an embedding to the head that shares its weight."""
    case = make_case("qwen3-tied", target_modules=["q_proj"], trainable_token_indices=[1, 5])
    out, ctx = case.merge(verify="spot")
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert ctx.facts["untied"] is False
    assert (logits(load(out)) - logits(case.reference())).abs().max() < 1e-5


def test_a_deeper_model_is_written_as_one(make_case):
    """Every copy of a layer has its own update; configuration and tensors agree on the number of layers."""
    case = make_case("qwen3", target_modules=["q_proj"], layer_replication=[[0, 2], [0, 1]])
    out, _ = case.merge(verify="spot")
    config = json.loads((out / "config.json").read_text())
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 3
    reference = case.reference()
    reference.get_base_model().config.layer_types = config["layer_types"]  # peft forgets them
    assert (logits(load(out)) - logits(reference)).abs().max() < 1e-5


def test_ranks_that_adalora_left(tmp_path):
    """A finished AdaLoRA run has cut every module to a rank of its own."""
    case = save_case(tmp_path, make_model("llama"), target_modules=["q_proj"])
    model = tf.AutoModelForCausalLM.from_pretrained(case.base)
    left = {f"model.layers.{n}.self_attn.q_proj.lora_E": [True, n == 0, True, False] for n in (0, 1)}
    config = AdaLoraConfig(init_r=4, lora_alpha=10, total_step=10, target_modules=["q_proj"], task_type="CAUSAL_LM")
    tuned = get_peft_model(model, config)
    randomise(tuned)
    tuned.peft_config["default"].rank_pattern = {f"{key}.default": ranks for key, ranks in left.items()}
    tuned.save_pretrained(case.adapter)
    shapes = {key: tuple(t.shape) for key, t in load_file(case.adapter / "adapter_model.safetensors").items()}
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_A"] == (3, 32)
    out, _ = case.merge(verify="spot")
    merged = logits(case.reference().merge_and_unload())
    assert (logits(load(out)) - merged).abs().max() < 1e-5
    assert (merged - logits(load(case.base))).abs().max() > 1e-3


def adalora(tmp_path, **changes):
    """A small AdaLoRA adapter with another configuration than it was trained with."""
    case = save_case(tmp_path, make_model("llama"), target_modules=["q_proj"])
    config = AdaLoraConfig(init_r=4, lora_alpha=10, total_step=10, target_modules=["q_proj"], task_type="CAUSAL_LM")
    tuned = get_peft_model(tf.AutoModelForCausalLM.from_pretrained(case.base), config)
    randomise(tuned)
    tuned.save_pretrained(case.adapter)
    path = case.adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return case


def test_names_that_no_module_has_take_no_time(tmp_path):
    """Peft compares every listed name with every other one."""
    many = [f"m{number}" for number in range(50_000)]
    case = adalora(tmp_path, target_modules=[*many, "q_proj"], exclude_modules=many)
    began = time.process_time()
    out, _ = case.merge(verify="spot")
    assert time.process_time() - began < 10
    assert (logits(load(out)) - logits(load(case.base))).abs().max() > 1e-3


def test_names_of_which_no_module_has_one_are_refused(tmp_path):
    case = adalora(tmp_path, target_modules=[f"m{number}" for number in range(50_000)])
    began = time.process_time()
    with pytest.raises(ModelMergeError, match="not found in the base model") as caught:
        case.merge()
    assert (caught.value.reason, time.process_time() - began < 10) == ("ADAPTER_UNSUPPORTED", True)


def test_a_rank_that_no_tensor_has_is_refused_before_factors_are_built(tmp_path):
    case = adalora(tmp_path, init_r=65_536, target_r=65_536)
    with pytest.raises(ModelMergeError, match="rank 65536") as caught:
        case.merge()
    assert caught.value.reason == "ADAPTER_CONFIG_INVALID"

"""What files tell of a base model: the adapter's own, another one, or nothing; each by real folders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.base_match import BaseMatch, BaseMatchStatus
from slipway.base_match.checkpoint import misfit
from slipway.base_match.evidence import UsedBase, match_base
from slipway.configuration import ExportConfiguration
from slipway.errors import CheckpointValidationError, ModelExportError
from slipway.export_sources.found import find_sources
from slipway.settings import Settings
from slipway.sources import SourceFolders
from support.models.headless_bases import make_headless

VOCABULARY, HIDDEN, WIDE, LAYERS = 40, 16, 24, 3
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
}
Tensors = dict[str, torch.Tensor]


def weights(seed: int = 0, *, hidden: int = HIDDEN, layers: int = LAYERS) -> Tensors:
    torch.manual_seed(seed)
    found = {"model.embed_tokens.weight": torch.randn(VOCABULARY, hidden), "model.norm.weight": torch.randn(hidden)}
    for layer in range(layers):
        found[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.randn(WIDE, hidden)
        found[f"model.layers.{layer}.mlp.down_proj.weight"] = torch.randn(hidden, WIDE)
    return found


def make_model(folder: Path, tensors: Tensors | None = None, **config: object) -> Path:
    folder.mkdir(parents=True)
    save_file(weights() if tensors is None else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path, *, first: int = 0, added: int = 0) -> None:
    vocabulary = {f"token{n}": n + first for n in range(VOCABULARY)}
    more = [{"id": VOCABULARY + n, "content": f"<new{n}>"} for n in range(added)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": more, "model": {"vocab": vocabulary}}))


def make_adapter(
    folder: Path, *, hidden: int = HIDDEN, layers: int = LAYERS, base: object = "base", **config: object
) -> Path:
    folder.mkdir(parents=True)
    tensors = {}
    for layer in range(layers):
        start = f"base_model.model.model.layers.{layer}.mlp.up_proj"
        tensors |= {f"{start}.lora_A.weight": torch.randn(4, hidden), f"{start}.lora_B.weight": torch.randn(WIDE, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    document = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": base, **config}
    (folder / "adapter_config.json").write_text(json.dumps(document))
    make_tokenizer(folder)
    return folder


def judge(used: Path, adapter: Path, *, trust: bool = False, contents: bool = True) -> BaseMatch:
    return match_base(UsedBase(used, used.name, contents=contents), [adapter], trust=trust)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A checkpoint of a run beside the base that it names."""
    make_model(tmp_path / "base")
    return make_adapter(tmp_path / "run" / "checkpoint-1")


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def copied(folder: Path) -> Path:
    return make_model(folder)


def linked(folder: Path) -> Path:
    shutil.copytree(folder.parent / "base", folder, copy_function=os.link)
    return folder


def in_bfloat16(folder: Path) -> Path:
    return make_model(folder, {name: tensor.bfloat16() for name, tensor in weights().items()})


def in_float16(folder: Path) -> Path:
    return make_model(folder, {name: tensor.half() for name, tensor in weights().items()})


def in_shards(folder: Path) -> Path:
    make_model(folder)
    (folder / "model.safetensors").unlink()
    index = {}
    for number, (name, tensor) in enumerate(weights().items()):
        shard = f"model-{number % 2}.safetensors"
        index[name] = shard
        path = folder / shard
        save_file({**(load_file(path) if path.exists() else {}), name: tensor}, path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def with_its_head(folder: Path) -> Path:
    return make_model(folder, weights() | {"lm_head.weight": weights()["model.embed_tokens.weight"].clone()})


def with_more_tokens(folder: Path) -> Path:
    tensors = weights()
    tensors["model.embed_tokens.weight"] = torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(8, HIDDEN)])
    return make_model(folder, tensors, vocab_size=VOCABULARY + 8)


@pytest.mark.parametrize("make", [copied, linked, in_bfloat16, in_float16, in_shards, with_its_head, with_more_tokens])
def test_the_same_weights_under_another_name_confirm_the_base(
    adapter: Path, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    found = judge(make(tmp_path / "another-name"), adapter)
    assert (found.status, found.verdict) == (BaseMatchStatus.CONFIRMED, "green"), found.reason


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_one_16_bit_type_made_from_the_other_is_the_same_model(tmp_path: Path, dtypes: tuple) -> None:
    first, second = dtypes
    stored = {name: tensor.to(first) for name, tensor in weights().items()}
    make_model(tmp_path / "base", stored)
    made = {name: tensor.to(second) for name, tensor in stored.items()}
    used = make_model(tmp_path / "converted", made)
    assert judge(used, make_adapter(tmp_path / "run" / "checkpoint-1")).status is BaseMatchStatus.CONFIRMED


def other_kind(folder: Path) -> Path:
    return make_model(folder, model_type="mistral", architectures=["MistralForCausalLM"])


def other_weights(folder: Path) -> Path:
    return make_model(folder, weights(seed=7))


def other_weights_in_bfloat16(folder: Path) -> Path:
    return make_model(folder, {name: (tensor * 1.01).bfloat16() for name, tensor in weights().items()})


def one_other_layer(folder: Path) -> Path:
    return make_model(folder, weights() | {"model.layers.1.mlp.down_proj.weight": torch.zeros(HIDDEN, WIDE)})


def other_tokenizer(folder: Path) -> Path:
    make_model(folder, weights(seed=7), quantization_config={"quant_method": "gptq"})
    make_tokenizer(folder, first=5)
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (other_kind, "model_type is 'mistral' (MistralForCausalLM) and not 'qwen3' (Qwen3ForCausalLM)"),
        (other_weights, "has other values"),
        (other_weights_in_bfloat16, "has other values"),
        (one_other_layer, "model.layers.1.mlp.down_proj.weight"),
        (other_tokenizer, "tokenizer"),
    ],
)
def test_another_base_is_refused_and_both_are_named(
    adapter: Path, tmp_path: Path, make: Callable[[Path], Path], says: str
) -> None:
    used = make(tmp_path / "elsewhere" / "base")  # its folder has the recorded name
    with pytest.raises(CheckpointValidationError) as error:
        judge(used, adapter)
    assert error.value.reason == "BASE_MODEL_MISMATCH"
    assert [text for text in (says, str(used), str(tmp_path / "base")) if text not in error.value.message] == []
    assert [
        text for text in ("base_model.name", "--base-model", "base_model.trust") if text not in error.value.remedy
    ] == []


def test_trust_takes_another_base_in_amber(adapter: Path, tmp_path: Path) -> None:
    found = judge(other_weights(tmp_path / "other"), adapter, trust=True)
    assert (found.status, found.verdict) == (BaseMatchStatus.TRUSTED, "amber")
    assert "has other values" in found.reason


def test_the_recorded_folder_itself_proves_nothing(adapter: Path, tmp_path: Path) -> None:
    found = judge(tmp_path / "base", adapter)
    assert (found.status, found.verdict) == (BaseMatchStatus.UNPROVEN, "amber")
    assert "only that name" in found.reason
    assert str(tmp_path) not in found.reason


def missing(tmp_path: Path) -> Path:
    shutil.rmtree(tmp_path / "base")
    return make_model(tmp_path / "used")


def recorded_is_quantized(tmp_path: Path) -> Path:
    config = CONFIG | {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    return make_model(tmp_path / "used", weights(seed=3))


def recorded_is_a_pickle(tmp_path: Path) -> Path:
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "base" / "pytorch_model.bin")
    return make_model(tmp_path / "used")


def recorded_has_no_weights(tmp_path: Path) -> Path:
    (tmp_path / "base" / "model.safetensors").unlink()
    return make_model(tmp_path / "used")


def recorded_is_cut_short(tmp_path: Path) -> Path:
    path = tmp_path / "base" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    return make_model(tmp_path / "used")


def recorded_config_is_a_pipe(tmp_path: Path) -> Path:
    (tmp_path / "base" / "config.json").unlink()
    os.mkfifo(tmp_path / "base" / "config.json")
    return make_model(tmp_path / "used")


def recorded_config_is_huge(tmp_path: Path) -> Path:
    with (tmp_path / "base" / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    return make_model(tmp_path / "used")


def only_the_vocabulary_differs(tmp_path: Path) -> Path:
    tensors = weights()
    tensors["model.embed_tokens.weight"][0] = 0
    return make_model(tmp_path / "used", tensors)


def test_weights_that_are_near_and_no_rounding_of_each_other_are_other_weights(adapter: Path, tmp_path: Path) -> None:
    near = {name: tensor * (1 + 1e-3) for name, tensor in weights().items()}
    with pytest.raises(CheckpointValidationError) as caught:
        judge(make_model(tmp_path / "used", near), adapter)
    assert caught.value.reason == "BASE_MODEL_MISMATCH"


def test_what_a_model_computes_itself_tells_nothing_of_its_weights(tmp_path: Path) -> None:
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "h.0.attn.bias": torch.ones(1, 1, 8, 8),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    make_model(tmp_path / "base", weights() | buffers)
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1")
    others = buffers | {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.0.attn.masked_bias": torch.tensor(-1e9)}
    others["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((4,), 1.0001)
    assert judge(make_model(tmp_path / "used", weights() | others), adapter).status is BaseMatchStatus.CONFIRMED


def test_a_folder_in_the_current_one_is_no_evidence_against_a_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(tmp_path / "far" / "off" / "from" / "run" / "checkpoint-1")
    make_model(tmp_path / "here" / "base", weights(seed=5))
    monkeypatch.chdir(tmp_path / "here")
    found = judge(make_model(tmp_path / "used"), adapter)
    assert found.status is BaseMatchStatus.UNPROVEN
    assert "current folder" in found.reason


def test_a_vocabulary_that_the_configuration_hides_may_be_resized(tmp_path: Path) -> None:
    hidden = {"vocab_size": None, "llm_config": {"vocab_size": VOCABULARY}}
    make_model(tmp_path / "base", **hidden)
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1")
    tensors = weights()
    tensors["model.embed_tokens.weight"] = torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(8, HIDDEN)])
    assert judge(make_model(tmp_path / "used", tensors, **hidden), adapter).status is BaseMatchStatus.CONFIRMED


def layers_in_8_bit(tmp_path: Path) -> Path:
    """Only the norms can be compared, which siblings share."""
    tensors = {n: t if "norm" in n else t.to(torch.float8_e4m3fn) for n, t in weights(seed=4).items()}
    return make_model(tmp_path / "used", tensors | {"model.norm.weight": weights()["model.norm.weight"]})


def rounded_twice(tmp_path: Path) -> Path:
    """One original's copy in float16 beside its copy in bfloat16, and back in float32."""
    save_file({n: t.bfloat16().float() for n, t in weights().items()}, tmp_path / "base" / "model.safetensors")
    return make_model(tmp_path / "used", {n: t.half() for n, t in weights().items()})


def rounded_and_back(tmp_path: Path) -> Path:
    return make_model(tmp_path / "used", {n: t.bfloat16().float() for n, t in weights().items()})


@pytest.mark.parametrize(
    "change",
    [
        rounded_twice,
        rounded_and_back,
        layers_in_8_bit,
        missing,
        recorded_is_quantized,
        recorded_is_a_pickle,
        recorded_has_no_weights,
        recorded_is_cut_short,
        recorded_config_is_a_pipe,
        recorded_config_is_huge,
        only_the_vocabulary_differs,
    ],
)
def test_what_cannot_be_compared_gets_no_verdict(adapter: Path, tmp_path: Path, change: Callable[[Path], Path]) -> None:
    found = judge(change(tmp_path), adapter)
    assert found.status is BaseMatchStatus.UNPROVEN, found.reason
    assert "'base'" in found.reason


@pytest.mark.parametrize(
    "name",
    [
        "",
        None,
        7,
        "~nobody-of-this-name/base",
        "a" * 5000,
        "a\0b",
        "../" * 2000,
        "\udc80",
        "https://[::1",
        "C:\\models\\base",
    ],
)
def test_hostile_names_are_names(tmp_path: Path, name: object) -> None:
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", base=name)
    found = judge(make_model(tmp_path / "used"), adapter)
    assert found.status is BaseMatchStatus.UNPROVEN
    labels = found.labels()
    assert all(len(value.encode()) <= 2048 and "\0" not in value for value in labels.values())
    assert BaseMatch.of_labels(labels).status is found.status


@pytest.mark.parametrize(
    "name", ["~nobody-of-this-name/base", "a" * 5000, "a\0b", "../" * 2000, "\udc80", "https://[::1"]
)
def test_a_hostile_name_is_a_base_that_is_not_found(tmp_path: Path, name: str) -> None:
    make_adapter(tmp_path / "run" / "checkpoint-1", base=name)
    configuration = ExportConfiguration.model_validate({"checkpoint": {"path": str(tmp_path / "run")}})
    settings = Settings.from_environment({"SLIPWAY_HOME": str(tmp_path / "home")})
    with SourceFolders(settings) as folders, pytest.raises(ModelExportError) as error:
        find_sources(configuration, folders)
    assert error.value.reason == "BASE_MODEL_NOT_FOUND"


def test_the_base_that_the_adapter_names_is_found_beside_the_run_first(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "work" / "base", weights(seed=5))  # of the same name, where the command is given
    monkeypatch.chdir(tmp_path / "work")
    configuration = ExportConfiguration.model_validate({"checkpoint": {"path": str(adapter.parent)}})
    settings = Settings.from_environment({"SLIPWAY_HOME": str(tmp_path / "home")})
    with SourceFolders(settings) as folders:
        assert find_sources(configuration, folders).base == tmp_path / "base"


def test_a_bucket_is_compared_by_headers_alone(adapter: Path, tmp_path: Path) -> None:
    """The contents of its weights are holes here."""
    used = make_model(tmp_path / "used", {name: torch.zeros_like(tensor) for name, tensor in weights().items()})
    assert judge(used, adapter, contents=False).status is BaseMatchStatus.UNPROVEN
    wrong = make_model(tmp_path / "wrong", model_type="llama")
    with pytest.raises(CheckpointValidationError, match="model_type"):
        judge(wrong, adapter, contents=False)


def cache(root: Path, tensors: Tensors, *, commit: str = "a" * 40) -> Path:
    """A snapshot of owner/base in a Hugging Face cache, of links to blobs."""
    snapshot = make_model(root / "hub" / "models--owner--base" / "snapshots" / commit, tensors)
    blobs = root / "hub" / "models--owner--base" / "blobs"
    blobs.mkdir(exist_ok=True)
    for path in sorted(snapshot.iterdir()):
        blob = blobs / f"{commit[0]}-{path.name}"
        path.rename(blob)
        path.symlink_to(blob)
    refs = root / "hub" / "models--owner--base" / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text(commit)
    return snapshot


def test_the_cached_repository_that_the_adapter_names_confirms_the_base(tmp_path: Path) -> None:
    snapshot = cache(tmp_path, weights())
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", base="owner/base")
    found = judge(snapshot, adapter)
    assert found.status is BaseMatchStatus.CONFIRMED
    assert "owner/base" in found.reason
    assert judge(make_model(tmp_path / "copy"), adapter).status is BaseMatchStatus.CONFIRMED
    # A folder of the repository's name beside the run is not the repository.
    with pytest.raises(CheckpointValidationError, match="other values"):
        judge(make_model(tmp_path / "owner" / "base", weights(seed=5)), adapter)


def test_two_revisions_of_a_repository_are_no_mismatch_unless_the_adapter_names_one(tmp_path: Path) -> None:
    older = cache(tmp_path, weights(seed=5), commit="b" * 40)
    cache(tmp_path, weights())
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", base="owner/base")
    assert judge(older, adapter).status is BaseMatchStatus.UNPROVEN
    named = make_adapter(tmp_path / "run" / "checkpoint-2", base="owner/base", revision="a" * 40)
    with pytest.raises(CheckpointValidationError, match="other values"):
        judge(older, named)


def test_of_several_adapters_the_least_certain_counts(adapter: Path, tmp_path: Path) -> None:
    used = copied(tmp_path / "used")
    unnamed = make_adapter(tmp_path / "second", base=None)
    found = match_base(UsedBase(used, "used", contents=True), [adapter, unnamed], trust=False)
    assert found.status is BaseMatchStatus.UNPROVEN


@pytest.mark.parametrize(
    ("adapter_has", "says"),
    [({"hidden": 32}, "lora_A.weight"), ({"layers": LAYERS + 2}, "model.layers.3")],
)
def test_an_adapter_of_another_size_is_refused_from_headers(tmp_path: Path, adapter_has: dict, says: str) -> None:
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", **adapter_has)
    used = make_model(tmp_path / "used")
    with pytest.raises(CheckpointValidationError, match=says) as error:
        judge(used, adapter, contents=False)
    assert error.value.reason == "ADAPTER_BASE_MISMATCH"


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "LOHA"},
        {"layer_replication": [[0, 2], [1, 3]]},
        {"use_qalora": True},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
    ],
)
def test_forms_that_are_not_understood_get_no_verdict(tmp_path: Path, config: dict) -> None:
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", hidden=32, layers=LAYERS + 2, **config)
    assert judge(make_model(tmp_path / "used"), adapter).status is BaseMatchStatus.UNPROVEN


def test_weights_stored_the_other_way_round_and_from_the_bare_model_fit(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1")
    tensors = {name.removeprefix("model."): tensor.t().contiguous() for name, tensor in weights().items()}
    assert judge(make_model(tmp_path / "used", tensors), adapter).status is BaseMatchStatus.UNPROVEN


@pytest.mark.parametrize(
    ("library", "refused"),
    [
        ("transformers.models.qwen3.modeling_qwen3", False),
        ("transformers.models.gpt2.modeling_gpt2", True),
        ("transformers_modules.mine.modeling_mine", False),
        (["transformers"], False),
    ],
)
def test_the_class_that_was_trained_tells(tmp_path: Path, library: object, refused: bool) -> None:
    mapping = {"base_model_class": "Model", "parent_library": library}
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", auto_mapping=mapping)
    used = make_model(tmp_path / "used")
    if not refused:
        assert judge(used, adapter).status is BaseMatchStatus.UNPROVEN
        return
    with pytest.raises(CheckpointValidationError, match="gpt2"):
        judge(used, adapter)


def test_added_tokens_make_no_other_tokenizer(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1")
    make_tokenizer(adapter, added=3)
    assert judge(make_model(tmp_path / "used"), adapter).status is BaseMatchStatus.UNPROVEN


def test_a_large_model_is_sampled_and_not_read(tmp_path: Path) -> None:
    """Files of 64 GiB, all of it holes: reading them would take minutes."""
    for folder in (tmp_path / "base", tmp_path / "used"):
        make_model(folder)
        header = {
            f"model.layers.{n}.mlp.up_proj.weight": {
                "dtype": "BF16",
                "shape": [1 << 17, 1 << 14],
                "data_offsets": [n << 32, (n + 1) << 32],
            }
            for n in range(16)
        }
        text = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + (16 << 32))
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", layers=0)
    assert judge(tmp_path / "used", adapter).status is BaseMatchStatus.CONFIRMED


def test_a_head_for_other_labels_contradicts_only_a_base_of_the_same_task(tmp_path: Path) -> None:
    base, adapter = make_headless("bert-other-labels", tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert misfit(adapter, config, base) == ""
    assert "classifier" in misfit(adapter, config | {"task_type": "TOKEN_CLS"}, base)

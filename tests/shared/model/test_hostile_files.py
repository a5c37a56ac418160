"""Whatever a file holds, its parser ends with a value or a documented reason, within a second and 100 MB."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipway.artifacts import ActionResult, LocalStore, Manifest
from slipway.artifacts.digests import digest_bytes
from slipway.base_match.recorded import recorded_base
from slipway.errors import CheckpointValidationError, ModelExportError
from slipway.files.checksums import read_checksums
from slipway.files.json_documents import parse_json
from slipway.model.base_format import base_format, prepared_sizes
from slipway.model.configuration import ModelConfig
from slipway.model.folder import ModelFolder
from slipway.model.model_files import has_chat_template, resolve_base_model
from slipway.model.runs.checkpoints import inspect_checkpoint, list_checkpoints, read_adapter_config
from slipway.model.safetensors_file import MOST_TENSORS, read_index, read_safetensors
from support.hostile.json_grammar import NUMBERS, TEXTS, VALUES, answer, documents

DIGEST = digest_bytes(b"")
ADAPTER = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4}, "alpha_pattern": {},
    "layer_replication": [[0, 2]], "base_model_name_or_path": "base", "modules_to_save": None,
}  # fmt: skip
STATE = {
    "global_step": 10,
    "log_history": [{"loss": 1.5, "step": 10}],
    "best_metric": 1.0,
    "best_model_checkpoint": "x",
}
CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 8, "quantization_config": {"bits": 4},
    "text_config": {},
}  # fmt: skip
ENTRY = {"path": "a", "size_bytes": 0, "digest": DIGEST, "media_type": "x"}
_HEADER_FIELDS = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
few = settings(max_examples=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def pack(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@settings(max_examples=150)
@given(data=documents({"a": 1, "b": [1, "x"]}), lenient=st.booleans())
def test_json(data: bytes, lenient: bool) -> None:
    def parsed() -> object:
        try:
            return json.dumps(parse_json(data, lenient=lenient), allow_nan=lenient, ensure_ascii=False).encode()
        except ValueError as error:
            assert len(str(error).splitlines()) == 1
            return None

    answer(parsed)


@few
@given(data=documents(ADAPTER))
def test_adapter_configurations(folder: Path, data: bytes) -> None:
    (folder / "adapter_config.json").write_bytes(data)
    answer(lambda: read_adapter_config(folder))
    found = answer(lambda: inspect_checkpoint(folder))
    assert not isinstance(found, ModelExportError)
    json.dumps(found.to_json(), allow_nan=False)
    assert found.rank is None or abs(found.rank) < 2**31


@few
@given(name=st.one_of(TEXTS, st.sampled_from(['"~a\\u0000b"', '"~\\ud800/x"'])).map(json.loads))
@example(name="~a\0b")
@example(name="~\ud800/x")
def test_names_of_base_models(folder: Path, name: str) -> None:
    import huggingface_hub.errors  # noqa: F401 - its import counts for no example

    found = answer(lambda: recorded_base(folder, {**ADAPTER, "base_model_name_or_path": name}))
    assert not isinstance(found, ModelExportError)
    assert found.folder is None
    refused = answer(lambda: resolve_base_model(name))
    assert isinstance(refused, ModelExportError)
    assert refused.reason in {"BASE_MODEL_NOT_FOUND", "BASE_MODEL_INVALID"}


@few
@given(data=documents(STATE))
def test_trainer_states(folder: Path, data: bytes) -> None:
    run = folder / "run"
    (run / "checkpoint-7").mkdir(parents=True, exist_ok=True)
    (run / "trainer_state.json").write_bytes(data)
    (run / "checkpoint-7" / "trainer_state.json").write_bytes(data)
    found = answer(lambda: list_checkpoints(run))
    assert not isinstance(found, ModelExportError)
    assert [checkpoint.path.name for checkpoint in found] == ["checkpoint-7"]
    json.dumps(found[0].to_json(), allow_nan=False, ensure_ascii=False).encode()
    assert 0 <= (found[0].step or 0) < 2**63


@few
@given(data=documents(CONFIG), tokenizer=documents({"chat_template": [{"name": "default", "template": "x"}]}))
def test_model_configurations(folder: Path, data: bytes, tokenizer: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    (folder / "model.safetensors").write_bytes(pack(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"))
    (folder / "tokenizer_config.json").write_bytes(tokenizer)
    answer(lambda: base_format(ModelFolder.open(folder)))
    answer(lambda: prepared_sizes(folder))
    answer(lambda: has_chat_template(folder))


@few
@given(
    data=st.one_of(
        documents({"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "../model.safetensors"}}),
        TEXTS.map(lambda name: f'{{"weight_map":{{"a":{name}}}}}'.encode()),
    )
)
@example(data=b'{"weight_map":{"a":"a\\u0000b"}}')
@example(data=b'{"weight_map":{"a":"%b"}}' % (b"x" * 300))
def test_indexes(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors.index.json").write_bytes(data)
    found = answer(lambda: read_index(folder / "model.safetensors.index.json"))
    assert isinstance(found, ModelExportError) or all("/" not in name for name in found.values())


def headers() -> st.SearchStrategy[bytes]:
    """Headers of safetensors files: of any JSON, and with hostile values in the right places."""
    sizes = st.lists(NUMBERS, max_size=5).map(lambda parts: f"[{','.join(parts)}]")
    entry = st.fixed_dictionaries(
        {
            '"dtype"': st.one_of(st.just('"F32"'), TEXTS),
            '"shape"': st.one_of(st.just("[2,3]"), sizes, VALUES),
            '"data_offsets"': st.one_of(st.just("[0,24]"), sizes, VALUES),
        }
    ).map(_object)
    tensors = st.lists(st.tuples(TEXTS, entry), max_size=3).map(lambda pairs: _object(dict(pairs)))
    whole = st.sampled_from(sorted(_HEADERS)).map(lambda name: _HEADERS[name]())
    return st.one_of(tensors, tensors, whole).map(str.encode) | documents({"a": _HEADER_FIELDS})


_HEADERS: dict[str, Callable[[], str]] = {
    "many tensors": lambda: _object({f'"t{number}"': json.dumps(_HEADER_FIELDS) for number in range(20_000)}),
    "many names twice": lambda: (
        "{" + ",".join(f'"t{number % 19_999}":{json.dumps(_HEADER_FIELDS)}' for number in range(20_000)) + "}"
    ),
    "many dimensions": lambda: _object({'"a"': json.dumps({**_HEADER_FIELDS, "shape": [2**62] * 150_000})}),
    "a shape beyond all machines": lambda: _object({'"a"': json.dumps({**_HEADER_FIELDS, "shape": [2**62, 2**62, 0]})}),
}


def _object(fields: dict[str, str]) -> str:
    return "{" + ",".join(f"{name}:{value}" for name, value in fields.items()) + "}"


@settings(max_examples=100)
@given(header=headers())
def test_safetensors_headers(folder: Path, header: bytes) -> None:
    path = folder / "hostile.safetensors"
    path.write_bytes(pack(header, bytes(24)))
    found = answer(lambda: read_safetensors(path))
    if not isinstance(found, ModelExportError):
        assert sum(info.nbytes for info in found.tensors.values()) == 24


@pytest.mark.slow
def test_an_adapter_of_every_expert_is_read(tmp_path: Path) -> None:
    """As many tensors, under the same names, as one of Kimi-K2 has."""
    entry = '"data_offsets":[0,0],"dtype":"F32","shape":[0,8]'
    names = (
        f'"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{part}_proj.lora_{half}.weight":{{{entry}}}'
        for layer in range(60)
        for expert in range(384)
        for part in ("gate", "up", "down")
        for half in "AB"
    )
    (tmp_path / "x.safetensors").write_bytes(pack(("{" + ",".join(names) + "}").encode()))
    assert len(read_safetensors(tmp_path / "x.safetensors").tensors) == 138_240


def test_more_tensors_than_any_file_has_are_refused_before_they_are_read(tmp_path: Path) -> None:
    entry = '"data_offsets":[0,0],"dtype":"F32","shape":[0]'
    names = (f'"t{number}":{{{entry}}}' for number in range(MOST_TENSORS + 1))
    (tmp_path / "x.safetensors").write_bytes(pack(("{" + ",".join(names) + "}").encode()))
    found = answer(lambda: read_safetensors(tmp_path / "x.safetensors"))
    assert isinstance(found, CheckpointValidationError)
    assert (found.reason, str(MOST_TENSORS) in found.message) == ("SAFETENSORS_CORRUPT", True)


@few
@given(
    data=st.one_of(
        documents({"version": 1, "files": [ENTRY]}),
        documents(ENTRY).map(lambda file: b'{"version":1,"files":[%b]}' % file),
    )
)
def test_manifests(data: bytes) -> None:
    found = answer(lambda: Manifest.from_bytes(data))
    if isinstance(found, Manifest):
        assert 0 <= found.size_bytes < 2**63
        assert Manifest.from_bytes(found.to_bytes()) == found


@pytest.mark.parametrize("size", ["Infinity", "1e400", "NaN", "1.5", '"0"', "true", str(2**63), "9" * 5000])
def test_impossible_sizes_in_a_manifest(size: str) -> None:
    data = json.dumps({"version": 1, "files": [ENTRY]}).replace('"size_bytes": 0', f'"size_bytes": {size}')
    found = answer(lambda: Manifest.from_bytes(data.encode()))
    assert isinstance(found, ModelExportError)
    assert found.reason == "ARTIFACT_INVALID"


def test_paths_of_many_folders_take_no_memory() -> None:
    files = [{**ENTRY, "path": f"{'a/' * 500}{number}"} for number in range(500)]
    found = answer(lambda: Manifest.from_bytes(json.dumps({"version": 1, "files": files}).encode()), megabytes=10)
    assert isinstance(found, ModelExportError)


@few
@given(data=documents({"outputs": {"pytorch": DIGEST}, "facts": {"a": 1}}))
def test_results_of_actions(folder: Path, data: bytes) -> None:
    store = LocalStore(folder / "store")
    path = folder / "store" / "actions" / "aa" / f"{'a' * 64}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    assert answer(lambda: ActionResult.from_bytes(data)) is None or store.recorded_action("a" * 64) is None


@few
@given(data=st.one_of(documents({"a": 1}), st.text(max_size=200).map(str.encode)))
def test_lists_of_checksums(folder: Path, data: bytes) -> None:
    (folder / "MANIFEST.sha256").write_bytes(data)
    answer(lambda: read_checksums(folder))


def test_shards_that_no_file_system_holds_are_missing(tmp_path: Path) -> None:
    for name in ("a\0b", "x" * 300):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointValidationError, match="is missing") as caught:
            read_index(tmp_path / "model.safetensors.index.json")
        assert caught.value.reason == "BASE_MODEL_INVALID"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("layer_replication", [[0, 10**9]]),
        ("layer_replication", [[0, 2]] * 3000),
        ("r", 10**7),
        ("r", 10**30),
        ("rank_pattern", {"q_proj": 10**8}),
        ("init_r", 10**6),
        ("num_vectors", 10**12),
        ("lora_alpha", float("inf")),
        ("loftq_config", {"bits": float("nan")}),
    ],
)
def test_counts_that_multiply_the_work_are_bounded(tmp_path: Path, option: str, value: Any) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**ADAPTER, option: value}))
    found = answer(lambda: read_adapter_config(tmp_path))
    assert isinstance(found, ModelExportError)
    assert (found.reason, option in found.message) == ("ADAPTER_CONFIG_INVALID", True)


def test_more_saved_modules_than_any_adapter_has_are_refused(tmp_path: Path) -> None:
    config = {**ADAPTER, "modules_to_save": [f"m{number}" for number in range(20_000)]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = answer(lambda: read_adapter_config(tmp_path))
    assert isinstance(found, ModelExportError)
    assert (found.reason, "modules_to_save has 20000 names" in found.message) == ("ADAPTER_CONFIG_INVALID", True)


def test_numbers_that_cost_nothing_are_taken(tmp_path: Path) -> None:
    config = {**ADAPTER, "total_step": 10**7, "random_loc_seed": 10**12, "layer_replication": [[0, 32], [16, 48]]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert read_adapter_config(tmp_path) == config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers"),
        ({"num_hidden_layers": 65_536}, "num_hidden_layers"),
        ({"num_labels": 10**9}, "num_labels"),
        ({"depths": [2000, 2000, 2000]}, "depths"),
        ({"attention_types": [[["global", "local"], 10**9]]}, "attention_types"),
        ({"num_hidden_layers": 4000, "text_config": {"num_local_experts": 60_000}}, "60000 experts"),
    ],
)
def test_more_than_a_machine_can_build(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answer(lambda: ModelConfig.read(tmp_path))
    assert isinstance(found, ModelExportError)
    assert (found.reason, named in found.message) == ("BASE_MODEL_INVALID", True)


def test_the_largest_known_models_can_be_built(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 126, "n_routed_experts": 384, "num_attention_heads": 128, "num_labels": 21_843, "hidden_size": 16_384,
        "layer_norm_eps": 1e-5, "depths": [2, 2, 18, 2], "mlp_only_layers": list(range(126)), "attention_types": [[["global", "local"], 16]],
        "max_position_embeddings": 10 << 20,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.read(tmp_path) == config


def test_what_training_and_transformers_write_is_taken(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-10"
    checkpoint.mkdir()
    state = '{"global_step": 10, "log_history": [{"loss": NaN, "grad_norm": Infinity}], "best_metric": NaN}'
    (checkpoint / "trainer_state.json").write_text(state)
    found = inspect_checkpoint(checkpoint)
    assert (found.step, found.loss, found.best_metric, found.warnings) == (10, None, None, ())
    (tmp_path / "config.json").write_text(
        '{"time_step_limit": [0.0, Infinity], "dtype": "float16", "dtype": "bfloat16"}'
    )
    assert ModelConfig.read(tmp_path) == {"time_step_limit": [0.0, float("inf")], "dtype": "bfloat16"}
    (tmp_path / "tokenizer_config.json").write_text(
        '{"model_max_length": 1000000000000000019884624838656, "chat_template": "x"}'
    )
    assert has_chat_template(tmp_path)

"""Bases that are pickles, prepared and loaded by transformers; what could run code, or is damaged, is refused."""

from __future__ import annotations

import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from slipway.errors import CheckpointValidationError
from slipway.model.base_format import base_format
from slipway.model.folder import ModelFolder
from slipway.model.safetensors_file import read_weights
from slipway_prepare.source import open_source
from support.hostile.json_grammar import answer
from support.models.prepare_models import loads, pickled, refusal, run


def test_a_pickle_with_ties_becomes_what_transformers_saves(dense, tmp_path):
    folder = pickled(dense, tmp_path)
    assert base_format(ModelFolder.open(folder)) == "pickle"
    out, tensors, facts = run(folder, tmp_path)
    expected = load_file(dense / "model.safetensors")
    assert sorted(tensors) == sorted(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert facts["source"] == "pickle"
    assert (out / "tokenizer.json").is_file()
    assert not list(out.glob("*.bin*"))
    loads(out)


def test_shards_of_pickles_become_shards_of_safetensors(dense, tmp_path):
    out, tensors, _ = run(pickled(dense, tmp_path, shards=3, tie=False), tmp_path, max_shard_bytes=60_000)
    expected = load_file(dense / "model.safetensors")
    assert len(list(out.glob("*.safetensors"))) > 2
    assert sorted(read_weights(out)) == sorted(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    loads(out)


def families():
    import transformers

    half = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    pair = {"d_model": 32, "vocab_size": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, **half}
    return {
        "bert": (transformers.BertForMaskedLM, {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}),
        "gpt2": (transformers.GPT2LMHeadModel, {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}),
        "marian": (transformers.MarianMTModel, {**pair, "decoder_start_token_id": 0}),
        "t5": (transformers.T5ForConditionalGeneration, {"d_model": 32, "num_layers": 1, "vocab_size": 64, "d_ff": 64}),
        "whisper": (transformers.WhisperForConditionalGeneration, {**pair, "decoder_start_token_id": 1}),
    }


@pytest.mark.parametrize("family", ["bert", "gpt2", "marian", "t5", "whisper"])
def test_other_architectures_with_the_ties_of_their_classes(tmp_path, family):
    cls, settings = families()[family]
    model = cls(cls.config_class(**settings))
    model.save_pretrained(tmp_path / "saved")
    expected = load_file(tmp_path / "saved" / "model.safetensors")
    (tmp_path / "saved" / "model.safetensors").unlink()
    torch.save({k: v for k, v in model.state_dict().items() if k in expected or "embed_positions" not in k},
               tmp_path / "saved" / "pytorch_model.bin")  # fmt: skip
    out, found, _ = run(tmp_path / "saved", tmp_path)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    _, info = cls.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(dense, tmp_path):
    folder = pickled(dense, tmp_path)
    torch.save({"a": Payload(tmp_path / "executed")}, folder / "pytorch_model.bin")
    assert refusal(folder, tmp_path).reason == "UNSAFE_PICKLE"
    assert not (tmp_path / "executed").exists()


def legacy(folder: Path, content: object) -> Path:
    """Save weights as torch did before version 1.6."""
    path = folder / "pytorch_model.bin"
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def test_a_pickle_of_before_torch_1_6_becomes_what_transformers_saves(dense, tmp_path):
    folder = pickled(dense, tmp_path)
    path = folder / "pytorch_model.bin"
    legacy(folder, torch.load(path, weights_only=True))
    assert not zipfile.is_zipfile(path)
    out, tensors, facts = run(folder, tmp_path)
    expected = load_file(dense / "model.safetensors")
    assert sorted(tensors) == sorted(expected)  # the tie was seen: both names share a tensor in the older file too
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert facts["source"] == "pickle"
    assert not [each for each in tmp_path.rglob("*") if each.name.startswith("pickle-")]
    loads(out)


def test_an_old_pickle_that_runs_code_is_refused_and_does_not_run(dense, tmp_path):
    folder = pickled(dense, tmp_path)
    legacy(folder, {"a": Payload(tmp_path / "executed")})
    error = refusal(folder, tmp_path)
    assert (error.reason, "would run code" in error.message) == ("UNSAFE_PICKLE", True)
    assert str(tmp_path) not in error.message
    assert not (tmp_path / "executed").exists()


def test_an_old_pickle_that_takes_memory_is_refused(dense, tmp_path):
    path = legacy(pickled(dense, tmp_path), {"a": torch.zeros(3)})
    head = path.read_bytes()[:18] + b"\x80\x02M\xe9\x03.\x80\x02}."
    path.write_bytes(head + b"\x80\x02cbuiltins\nbytearray\nJ" + struct.pack("<i", 2 * 10**9) + b"\x85R.")
    error = refusal(path.parent, tmp_path)
    assert (error.reason, "memory" in error.message) == ("UNSAFE_PICKLE", True)


def test_an_old_pickle_that_is_cut_short_is_refused(dense, tmp_path):
    path = pickled(dense, tmp_path) / "pytorch_model.bin"
    legacy(path.parent, torch.load(path, weights_only=True))
    path.write_bytes(path.read_bytes()[:-100])
    assert refusal(path.parent, tmp_path).reason == "BASE_MODEL_INVALID"


def test_what_torch_does_not_save_is_named_as_such(tmp_path):
    path = saved(tmp_path / "model", {})
    path.write_bytes(pickle.dumps({"a": 1}))
    error = refused(path)
    assert (error.reason, "no file that torch saves" in error.message) == ("BASE_MODEL_INVALID", True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    error = refused(path)
    assert (error.reason, "tar archive" in error.message) == ("UNSAFE_PICKLE", True)


@pytest.mark.parametrize(
    "content",
    [{"a": 1}, [torch.zeros(1)], {3: torch.zeros(1), "a": torch.zeros(1)}],
    ids=["number", "list", "mixed-names"],
)
def test_a_pickle_of_something_else_is_refused(dense, tmp_path, content):
    folder = pickled(dense, tmp_path)
    torch.save(content, folder / "pytorch_model.bin")
    assert refusal(folder, tmp_path).reason == "BASE_MODEL_INVALID"


def test_a_damaged_pickle_is_refused(dense, tmp_path):
    folder = pickled(dense, tmp_path)
    path = folder / "pytorch_model.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert refusal(folder, tmp_path).reason in {"BASE_MODEL_INVALID", "UNSAFE_PICKLE"}


@pytest.mark.parametrize("length", [1, 2, 3, 10, 45, 300])
def test_an_instruction_stream_cut_short_is_refused(dense, tmp_path, length):
    path = pickled(dense, tmp_path) / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content[:length] if name.endswith("data.pkl") else content)
    assert refusal(path.parent, tmp_path).reason in {"BASE_MODEL_INVALID", "UNSAFE_PICKLE"}


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def saved(folder: Path, content: object) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def refused(path: Path) -> CheckpointValidationError:
    """The refusal of a file that wants more memory or time than it may take."""
    found = answer(lambda: open_source(path.parent, path.parent))
    assert isinstance(found, CheckpointValidationError)
    return found


def rewrite(path: Path, *, instructions: bytes | None = None, compression: int = zipfile.ZIP_STORED) -> None:
    members = members_of(path)
    with zipfile.ZipFile(path, "w", compression=compression) as archive:
        for name, content in members.items():
            archive.writestr(name, instructions if instructions and name.endswith("data.pkl") else content)


def test_a_member_that_grows_when_it_is_unpacked_is_refused(tmp_path):
    path = saved(tmp_path / "model", {"a": torch.zeros(3)})
    rewrite(path, instructions=b"N" * 150_000_000 + b".", compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1_000_000
    error = refused(path)
    assert (error.reason, "compressed" in error.message) == ("UNSAFE_PICKLE", True)


def test_instructions_that_take_memory_are_refused(tmp_path):
    path = saved(tmp_path / "model", {"a": torch.zeros(3)})
    calls = b"\x80\x02cbuiltins\nbytearray\nJ" + struct.pack("<i", 10**9) + b"\x85R."
    rewrite(path, instructions=calls)
    error = refused(path)
    assert (error.reason, "bytearray" in error.message) == ("UNSAFE_PICKLE", True)


def test_more_instructions_than_tensors_need_are_refused(tmp_path):
    path = saved(tmp_path / "model", {"a": torch.zeros(3)})
    rewrite(path, instructions=b"\x80\x02" + b"N0" * 9_000_000 + b".")
    assert refused(path).reason == "UNSAFE_PICKLE"


def test_a_tensor_that_repeats_what_is_stored_is_refused(tmp_path):
    path = saved(tmp_path / "model", {"a": torch.zeros(1).expand(10**5, 10**5)})
    error = refused(path)
    assert (error.reason, "larger than the file" in error.message) == ("BASE_MODEL_INVALID", True)


def test_views_that_overlap_are_refused_unless_they_are_ties(tmp_path):
    """12 GB were planned of a file of 4 MB."""
    stored = torch.zeros(4096)
    path = saved(tmp_path / "ties", dict.fromkeys(("shared", "encoder", "decoder", "head"), stored))
    with open_source(path.parent, path.parent) as tied:
        assert len(tied.aliases[0]) == 4
    path = saved(tmp_path / "model", {str(start): stored[start:] for start in range(3000)})
    error = refused(path)
    assert (error.reason, "overlap" in error.message) == ("BASE_MODEL_INVALID", True)


def test_two_archives_in_one_file_are_refused(tmp_path):
    path = saved(tmp_path / "model", {"a": torch.zeros(3)})
    path.write_bytes(path.read_bytes() + b"more")
    assert refused(path).reason == "UNSAFE_PICKLE"


def test_parameters_and_other_types_are_taken(tmp_path):
    """What torch itself names in the pickle of a state: a name that is missing here would refuse a good model."""
    linear = torch.nn.Linear(2, 2)
    types = (torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int64, torch.bool)
    content = linear.state_dict() | {str(dtype): torch.zeros(2, dtype=dtype) for dtype in types}
    content |= {
        "parameter": linear.weight,
        "float8": torch.zeros(2).to(torch.float8_e4m3fn),
        "view": torch.ones(4, 4).T[1],
    }
    path = saved(tmp_path / "model", content)
    with open_source(path.parent, path.parent) as source:
        assert sorted(source.tensors) == sorted(content)


@given(data=st.data())
def test_no_changed_byte_of_a_pickle_gets_further_than_a_refusal(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "mutated-pickle"
    path = saved(folder, {"a": torch.zeros(3), "b": torch.ones(2, 2)})
    instructions = bytearray(next(content for name, content in members_of(path).items() if name.endswith("data.pkl")))
    for _ in range(data.draw(st.integers(1, 3))):
        instructions[data.draw(st.integers(0, len(instructions) - 1))] = data.draw(st.integers(0, 255))
    rewrite(path, instructions=bytes(instructions))
    answer(lambda: sorted(open_source(folder, folder).tensors))

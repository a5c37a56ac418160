"""Every reader against what the library that defines the format makes of the same stored tensors (see tests/support/models/quantized)."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.model.configuration import ModelConfig
from slipway_prepare.bitsandbytes_format import dynamic_map, nf4_round_trip, read_bitsandbytes
from slipway_prepare.gptq_format import read_awq, read_gptq
from slipway_prepare.recipes import Base
from slipway_prepare.source import SafetensorsSource
from support import SUPPORT
from support.models.quantized.make_fixtures import large_weight

FIXTURES = SUPPORT / "models" / "quantized"


def stored(tmp_path, name, prefix):
    """A case of a fixture as a model folder, and what it should become."""
    tensors = load_file(FIXTURES / f"{name}.safetensors")
    save_file({k: v for k, v in tensors.items() if k.startswith(f"{prefix}.")}, tmp_path / "model.safetensors")
    return SafetensorsSource(tmp_path), tensors[f"expected.{prefix}"], tensors


def only(made, source):
    """The one weight that a reader makes, which uses every stored tensor."""
    (recipe,) = made.recipes
    assert sorted([*recipe.parts, *made.dropped]) == sorted(source.tensors)
    with source:
        value = recipe.build(source.read)
    assert (value.dtype, tuple(value.shape)) == (recipe.dtype, recipe.shape)
    return value


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("nested", ["plain", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bit_of_bitsandbytes_bit_for_bit(tmp_path, kind, nested, dtype):
    source, expected, _ = stored(tmp_path, "bitsandbytes", f"{kind}_{nested}_{dtype}")
    made = read_bitsandbytes(Base(tmp_path, ModelConfig({}), {"quant_method": "bitsandbytes"}, source))
    assert made.method == f"bitsandbytes {kind}"
    assert made.details == {"double_quantization": nested == "nested"}
    assert torch.equal(only(made, source), expected)


def test_int8_of_bitsandbytes_bit_for_bit(tmp_path):
    source, expected, _ = stored(tmp_path, "bitsandbytes", "int8")
    made = read_bitsandbytes(
        Base(tmp_path, ModelConfig({"dtype": "bfloat16"}), {"quant_method": "bitsandbytes"}, source)
    )
    assert torch.equal(only(made, source), expected.bfloat16())


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("order", ["", "_order"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_bit_for_bit(tmp_path, bits, order, version):
    case = f"gptq{bits}{order}"
    _, expected, tensors = stored(tmp_path, "gptq", case)
    parts = {k: v for k, v in tensors.items() if k.startswith(f"{case}.")}
    if version == "gptq_v2":
        parts[f"{case}.qzeros"] = tensors[f"v2.{case}.qzeros"]
    save_file(parts, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": version}
    value = only(read_gptq(Base(tmp_path, ModelConfig({}), settings, source)), source)
    assert torch.equal(value, expected)


def test_awq_bit_for_bit(tmp_path):
    source, expected, _ = stored(tmp_path, "awq", "awq")
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    assert torch.equal(only(read_awq(Base(tmp_path, ModelConfig({}), settings, source)), source), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nf4_round_trip_bit_for_bit(dtype):
    tensors = load_file(FIXTURES / "nf4_round_trip.safetensors")
    assert torch.equal(nf4_round_trip(tensors[f"weight.{dtype}"]), tensors[f"expected.{dtype}"])


def test_nf4_round_trip_of_several_nested_blocks_bit_for_bit():
    digest = load_file(FIXTURES / "nf4_round_trip.safetensors")["sha256.large"]
    found = nf4_round_trip(large_weight()).view(torch.uint8).numpy().tobytes()
    assert list(hashlib.sha256(found).digest()) == digest.tolist()


def test_the_dynamic_type_has_256_sorted_values():
    values = dynamic_map()
    assert len(set(values.tolist())) == 256
    assert torch.equal(values, values.sort().values)

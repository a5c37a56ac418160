"""What is written is what compressed-tensors' own code writes and reads, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from slipway.errors import QuantizationError
from slipway.model.dtypes import torch_dtypes
from slipway_quantize.forms.channels import Channels
from slipway_quantize.forms.form import Form
from slipway_quantize.forms.fp4 import Mxfp4, Nvfp4, nearest, nearest_codes
from slipway_quantize.forms.integers import PackedIntegers
from slipway_quantize.grid.search import pack_codes, pack_words, unpack_codes
from slipway_quantize.levels import IntLevel
from slipway_quantize.model_weights import as_array

MODULE = "layers.0.mlp.up_proj"
Make = Callable[[str], Form]
FORMS: dict[str, tuple[str, Make]] = {
    "fp8": ("FP8_DYNAMIC", lambda dtype: Channels("F8_E4M3", scale_dtype=dtype)),
    "fp8_static": ("", lambda dtype: Channels("F8_E4M3", scale_dtype=dtype, ranges={MODULE: 3.7})),
    "w8a8": ("W8A8", lambda dtype: Channels("I8", scale_dtype=dtype)),
    "nvfp4": ("NVFP4A16", lambda dtype: Nvfp4(dtype, {"layers.0.mlp": 0.31})),
    "mxfp4": ("MXFP4A16", Mxfp4),
    "int3": (
        "W3A16",
        lambda dtype: PackedIntegers(IntLevel(3, 128, packed=True), scale_dtype=dtype, calibrated={}, asymmetric=False),
    ),
    "int5": (  # no level has so many bits yet; the form takes any
        "",
        lambda dtype: PackedIntegers(IntLevel(5, 32, packed=True), scale_dtype=dtype, calibrated={}, asymmetric=False),
    ),
}
DTYPES = ["F32", "BF16", "F16"]


def weight_of(dtype: str) -> torch.Tensor:
    """Rows of many sizes, an outlier, zeros, and a row of zeros alone."""
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(7)) * 0.05
    weight *= torch.logspace(-3, 0, 48)[:, None]
    weight[3, 5], weight[4, ::3], weight[5] = 0.3, 0.0, 0.0
    return weight.to(torch_dtypes(dtype)[dtype])


def scheme_of(form: Form) -> QuantizationScheme:
    return QuantizationScheme(
        targets=["Linear"],
        format=form.format,
        weights=dict(form.weights),
        input_activations=None if form.activations is None else dict(form.activations),
    )


def stored(form: Form, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors that a file would have, and the values that are meant."""
    rounded = form.round_rows(as_array(weight), 0, module=MODULE, name="w")
    found = {}
    for part, (dtype, shape) in form.parts(MODULE, tuple(weight.shape)).items():
        given = {**rounded.parts, **form.whole(MODULE, tuple(weight.shape))}[part]
        found[part] = torch.from_numpy(np.ascontiguousarray(given).reshape(-1).view(np.uint8))
        found[part] = found[part].view(torch_dtypes(dtype)[dtype]).reshape(shape)
    return found, torch.from_numpy(rounded.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", FORMS)
def test_decompressed_weights_are_the_values_that_were_meant(level: str, dtype: str) -> None:
    form = FORMS[level][1](dtype)
    parts, values = stored(form, weight_of(dtype))
    compressor = BaseCompressor.get_value_from_registry(form.format)
    found = compressor.decompress(parts, scheme_of(form))["weight"]
    meant = values.to(torch.bfloat16 if level in ("nvfp4", "mxfp4") else torch_dtypes(dtype)[dtype])
    assert found.dtype == meant.dtype
    assert torch.equal(found, meant)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [level for level in FORMS if level != "int5"])
def test_the_library_makes_the_same_codes_with_the_same_scales(level: str, dtype: str) -> None:
    """In float32: in 16 bits the library divides in 16 bits, which rounds twice.

    With 5 bits one of 12,288 weights lies so close to a tie that dividing by the scale and multiplying by its inverse differ.
    """
    form, weight = FORMS[level][1](dtype), weight_of(dtype)
    parts, _ = stored(form, weight)
    scale = torch.exp2(parts["weight_scale"].float() - 127) if level == "mxfp4" else parts["weight_scale"].float()
    given = {**parts, "weight": weight.float(), "weight_scale": scale}
    given.pop("weight_packed", None)
    compressor = BaseCompressor.get_value_from_registry(form.format)
    found = compressor.compress(given, scheme_of(form))
    name = "weight" if "weight" in parts else "weight_packed"
    assert found.keys() == parts.keys()
    assert torch.equal(found[name].view(torch.uint8), parts[name].view(torch.uint8))
    assert torch.equal(found["weight_scale"].float(), parts["weight_scale"].float())


@pytest.mark.parametrize("level", [level for level, (preset, _) in FORMS.items() if preset])
def test_schemes_are_the_library_s_own(level: str) -> None:
    preset, make = FORMS[level]
    own, theirs = scheme_of(make("BF16")), preset_name_to_scheme(preset, ["Linear"])
    for mine, other in ((own.weights, theirs.weights), (own.input_activations, theirs.input_activations)):
        assert (mine is None) == (other is None)
        if mine is not None:
            untold = {"zp_dtype", "observer", "observer_kwargs"}
            assert mine.model_dump(exclude=untold) == other.model_dump(exclude=untold)


def test_every_4_bit_float_and_every_tie() -> None:
    floats = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert nearest_codes(floats).tolist() == [*range(8)]
    assert nearest_codes(-floats[1:]).tolist() == [*range(9, 16)]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    assert nearest(ties).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    assert nearest(-ties).tolist() == [0, -1, -1, -2, -2, -4, -4, -6]


def test_a_group_has_the_better_of_two_scales() -> None:
    weight = torch.tensor([[4.0, *[3.0] * 15], [6.0, *[0.5] * 15]]).repeat(1, 2)
    form = Mxfp4("BF16")
    assert form.round_rows(as_array(weight), 0, module=MODULE, name="w").squares[0] == 0
    seven = torch.full((1, 32), 7.9)
    assert float(form.round_rows(as_array(seven), 0, module=MODULE, name="w").values()[0, 0]) == 8.0  # not 6


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("columns", [32, 48, 320])
def test_codes_of_odd_widths_lie_as_the_library_packs_them(columns: int, bits: int) -> None:
    limit = 1 << (bits - 1)
    codes = np.random.default_rng(0).integers(-limit, limit, (7, columns), np.int8)
    assert np.array_equal(unpack_codes(pack_codes(codes, bits=bits), bits=bits), codes)
    words = torch.from_numpy(np.ascontiguousarray(pack_words(codes, bits=bits)))
    assert torch.equal(words, pack_to_int32(torch.from_numpy(codes), bits))
    assert torch.equal(unpack_from_int32(words, bits, torch.Size(codes.shape)), torch.from_numpy(codes))


@pytest.mark.parametrize("level", FORMS)
def test_what_is_not_finite_is_named(level: str) -> None:
    weight = weight_of("F32")
    weight[40, 9] = float("nan")
    with pytest.raises(QuantizationError, match="'w' has 1 NaN or infinite value"):
        FORMS[level][1]("F32").round_rows(as_array(weight), 0, module=MODULE, name="w")


def test_a_scale_beyond_its_type_is_named() -> None:
    weight = torch.full((2, 32), 1e9)
    with pytest.raises(QuantizationError) as caught:
        Channels("I8", scale_dtype="F16").round_rows(as_array(weight), 0, module=MODULE, name="w")
    assert caught.value.reason == "WEIGHT_OVERFLOW"

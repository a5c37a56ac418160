"""Make the fixtures beside this file with the libraries that define the formats, on a CPU; not run by the tests.

``pip install torch safetensors bitsandbytes==0.50.2`` and, for their sources, ``pip download --no-deps autoawq==0.2.9 gptqmodel==7.7.0``
unpacked; then ``python make_fixtures.py AUTOAWQ_FOLDER GPTQMODEL_FOLDER``.

Each file holds stored tensors ``CASE.weight…`` as a checkpoint has them, and ``expected.CASE``: what the library dequantizes them to.
Remove ``libbitsandbytes_cpu.so`` from bitsandbytes first, so that its portable kernels run, which do as those for GPUs: the CPU library
looks 8-bit codes up in a table instead of taking the nearest, and in 0.50.2 it mixes up blocks that cross a row's end.
"""

import hashlib
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent


def bitsandbytes_cases() -> dict[str, torch.Tensor]:
    import bitsandbytes.functional as bnb

    found = {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            for dtype, shape in ((torch.bfloat16, (8, 96)), (torch.float16, (5, 26))):
                case = f"{kind}_{'nested' if nested else 'plain'}_{str(dtype)[6:]}"
                weight = (torch.randn(shape) * 0.05).to(dtype)
                packed, state = bnb.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=64)
                parts = state.as_dict(packed=True)
                found |= {f"{case}.weight": packed} | {f"{case}.weight.{key}": value for key, value in parts.items()}
                found[f"expected.{case}"] = bnb.dequantize_4bit(packed, state).reshape(shape)
    weight = torch.randn(6, 40, dtype=torch.float16)
    codes, scale, _ = bnb.int8_vectorwise_quant(weight.clone())
    found |= {"int8.weight": codes, "int8.SCB": scale, "int8.weight_format": torch.tensor(0, dtype=torch.uint8)}
    found["expected.int8"] = bnb.int8_vectorwise_dequant(codes, scale)
    return found


def round_trip_cases() -> dict[str, torch.Tensor]:
    import bitsandbytes.functional as bnb

    found = {}
    for dtype, shape in ((torch.float32, (7, 70)), (torch.float16, (33, 65))):
        weight = (torch.randn(shape) * 0.05).to(dtype)
        if dtype == torch.float32:
            weight[:2] = 0
        packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True, blocksize=64)
        case = str(dtype)[6:]
        found |= {f"weight.{case}": weight, f"expected.{case}": bnb.dequantize_4bit(packed, state).reshape(shape)}
    packed, state = bnb.quantize_4bit(large_weight(), quant_type="nf4", compress_statistics=True, blocksize=64)
    digest = hashlib.sha256(bnb.dequantize_4bit(packed, state).view(torch.uint8).numpy().tobytes()).digest()
    return found | {"sha256.large": torch.tensor(list(digest), dtype=torch.uint8)}


def large_weight() -> torch.Tensor:
    """Weights of more than 256 blocks, the same everywhere without being stored: a linear congruential sequence."""
    count = torch.arange(300 * 256, dtype=torch.int64)
    return (((count * 1_103_515_245 + 12_345) % 65_536 - 32_768).float() / 2**20).bfloat16().reshape(300, 256)


def package(name: str, folder: Path) -> None:
    """Make a package's modules importable without running its ``__init__``."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def awq_cases(folder: Path) -> dict[str, torch.Tensor]:
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        package(name, folder / name.replace(".", "/"))
    sys.modules["awq.utils.utils"] = types.SimpleNamespace(get_best_device=lambda: "cpu")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = torch.nn.Linear(64, 32, bias=False, dtype=torch.float16)
    scales = (torch.rand(2, 32) * 0.02 + 0.01).half()
    zeros = torch.randint(0, 16, (2, 32))
    spread = scales.repeat_interleave(32, 0).T
    codes = torch.randint(0, 16, (32, 64))
    linear.weight.data = ((codes - zeros.repeat_interleave(32, 0).T) * spread).half()
    packed = WQLinear_GEMM.from_linear(linear, 4, 32, scales=scales.T.contiguous().T, zeros=zeros)
    parts = {name: getattr(packed, name).contiguous() for name in ("qweight", "qzeros", "scales")}
    dense = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, 32)
    return {f"awq.{name}": value for name, value in parts.items()} | {"expected.awq": dense.T.contiguous()}


def gptq_cases(folder: Path) -> dict[str, torch.Tensor]:
    sys.path.insert(0, str(folder))
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    found = {}
    for bits in (2, 4, 8):
        for order in (False, True):
            case = f"gptq{bits}{'_order' if order else ''}"
            zeros = torch.randint(1, 2**bits, (32, 2))
            scales = (torch.rand(32, 2) * 0.02 + 0.01).half()
            groups = torch.arange(64) // 32
            groups = groups[torch.randperm(64)] if order else groups
            codes = torch.randint(0, 2**bits, (32, 64))
            linear = torch.nn.Linear(64, 32, bias=False)
            linear.weight.data = (codes - zeros[:, groups]).float() * scales[:, groups].float()
            layer = TorchLinear(
                bits=bits, group_size=32, sym=False, desc_act=order, in_features=64, out_features=32, bias=False,
                pack_dtype=torch.int32, register_buffers=True,
            )  # fmt: skip
            layer.pack(linear, scales.clone(), zeros.clone(), groups.to(torch.int32))
            v2 = layer.qzeros.clone()
            layer = (
                convert_gptq_v2_to_v1_format_module(
                    layer, types.SimpleNamespace(runtime_bits=bits, bits=bits, pack_dtype=torch.int32)
                )
                or layer
            )
            v1 = layer.qzeros.clone()
            convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
            assert torch.equal(layer.qzeros, v2)
            assert not torch.equal(v1, v2)
            layer.post_init()
            dense = layer.dequantize_weight().T.contiguous()
            for name in ("qweight", "scales", "g_idx"):
                found[f"{case}.{name}"] = getattr(layer, name).clone().contiguous()
            found |= {f"{case}.qzeros": v1, f"v2.{case}.qzeros": v2, f"expected.{case}": dense}
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    makers = {
        "bitsandbytes": bitsandbytes_cases,
        "nf4_round_trip": round_trip_cases,
        "awq": lambda: awq_cases(Path(sys.argv[1])),
        "gptq": lambda: gptq_cases(Path(sys.argv[2])),
    }
    for name in sys.argv[3:] or makers:
        save_file({key: value.contiguous() for key, value in makers[name]().items()}, HERE / f"{name}.safetensors")

"""Write the experts of gpt-oss in MXFP4 as OpenAI does, which transformers and vLLM read; all other weights stay as they are.

Axes: E experts, N output features, K input features. A stack is (E, K, N) in 16 bits; in MXFP4 it is ``blocks`` (E, N, K/32, 16), two
weights a byte, the first in the low half, and ``scales`` (E, N, K/32), exponents plus 127. Columns of gates and what they multiply stay interleaved.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from slipway.errors import QuantizationError
from slipway.model.safetensors_file import TensorInfo
from slipway.model.safetensors_layout import TensorSpec
from slipway.model.weights.reading import Weights, row_pieces
from slipway_quantize.checkpoints.weights_file import WeightsFile
from slipway_quantize.experts import OPENAI_LEVEL, OPENAI_TYPE, keeps_experts, model_type
from slipway_quantize.forms.form import FLOAT_GROUPS
from slipway_quantize.model_weights import limit_torch, read_rows, read_tensors, require_finite
from slipway_quantize.pieces import PIECE_WEIGHTS, Pieces, Squares
from slipway_quantize.quantizer import QuantizeRequest
from slipway_quantize.report import Outcome, read_json, write_json

if TYPE_CHECKING:
    from slipway_quantize.forms.fp4 import Mxfp4

_STACKS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_LEFT = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
"""Modules that keep their type, as OpenAI's ``config.json`` names them."""
_DIMENSIONS = 3
_GROUP = FLOAT_GROUPS["mxfp4"]
_BYTES = _GROUP // 2


def is_openai_mxfp4(request: QuantizeRequest) -> bool:
    """Return whether a request is for OpenAI's form of a model's experts."""
    params = request.params
    asked = params.level == OPENAI_LEVEL and params.packed and not keeps_experts(params.keep)
    return asked and model_type(request.model.config) == OPENAI_TYPE


def write_openai_mxfp4(request: QuantizeRequest, weights: Weights) -> Outcome:
    """Write the stacks of a folder in MXFP4, one expert at a time, and ``config.json`` to match.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``, ``NON_FINITE_WEIGHTS``, and the reasons of :func:`read_tensors`.
    """
    tensors, ctx = read_tensors(weights), request.ctx
    limit_torch(ctx.threads)
    from slipway_quantize.forms.fp4 import Mxfp4

    stacks = {name for name, info in tensors.items() if name.endswith(_STACKS)}
    odd = next((name for name in sorted(stacks) if not _fits(tensors[name])), "")
    if odd or not stacks:
        what = (
            f"{odd!r} has the shape {tensors[odd].shape}, and MXFP4 has groups of {_GROUP} along the second of three axes"
            if odd
            else "it has no experts"
        )
        raise QuantizationError(
            f"the experts of this model are not written in MXFP4: {what}",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="use level bf16, or GGUF",
            about={"tensor": odd},
        )
    form = Mxfp4("BF16")
    outcome = Outcome(method="MXFP4 experts as OpenAI stores them", details={"expert_stacks": len(stacks)})
    groups = [_planned(info) if info.name in stacks else [_same(info)] for info in tensors.values()]
    total, done = sum(info.nbytes for info in tensors.values()), 0
    with (
        WeightsFile(request.target, groups, max_shard_bytes=request.params.max_shard_bytes) as file,
        Pieces(outcome, threads=ctx.threads) as pieces,
    ):
        for info in tensors.values():
            ctx.progress("quantize", done=done, total=total)
            done += info.nbytes
            if info.name in stacks:
                outcome.quantized.append(info.name)
                for expert in range(info.shape[0]):
                    pieces.add(partial(_write_expert, weights, info, expert, form, file))
                continue
            outcome.kept[info.name] = "no expert"
            for row, count in row_pieces(info, PIECE_WEIGHTS):
                values = read_rows(weights, info, row, count)
                require_finite(values, info.name)
                file.write(info.name, values, row=row)
    config = read_json(request.target / "config.json")
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": list(_LEFT)}
    write_json(request.target / "config.json", config)
    return outcome


def _same(info: TensorInfo) -> TensorSpec:
    return TensorSpec(info.name, info.dtype, info.shape)


def _fits(info: TensorInfo) -> bool:
    """Return whether a tensor is a stack whose input features are whole groups."""
    return len(info.shape) == _DIMENSIONS and info.shape[1] % _GROUP == 0


def _planned(info: TensorInfo) -> list[TensorSpec]:
    """Return the tensors of a stack (E, K, N)."""
    experts, columns, rows = info.shape
    groups = (experts, rows, columns // _GROUP)
    return [TensorSpec(f"{info.name}_blocks", "U8", (*groups, _BYTES)), TensorSpec(f"{info.name}_scales", "U8", groups)]


def _write_expert(weights: Weights, info: TensorInfo, expert: int, form: Mxfp4, file: WeightsFile) -> Squares:
    matrix = read_rows(weights, info, expert, 1)[0].T  # (N, K)
    rounded = form.round_rows(matrix, 0, module=info.name, name=info.name)
    file.write_bytes(f"{info.name}_blocks", rounded.parts["weight_packed"], row=expert)
    file.write_bytes(f"{info.name}_scales", rounded.parts["weight_scale"], row=expert)
    return rounded.squares

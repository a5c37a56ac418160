"""The work of the stage: read the base, plan every tensor of the result, write them, and report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipway.files.paths import real_file
from slipway.model.configuration import ModelConfig
from slipway.model.dtypes import DTYPES, FLOATS, torch_dtypes
from slipway.model.model_files import (
    CHAT_TEMPLATES,
    CONFIG,
    GENERATION_CONFIG,
    LEFTOVERS,
    copy_companions,
    has_chat_template,
    has_safetensors,
)
from slipway.model.sentences import MODULE_WEIGHTS, pickled_modules
from slipway.model.tokens.byte_level import complete_tokenizer
from slipway.model.tokens.sound import sound_codec
from slipway.model.tokens.tekken import TEKKEN
from slipway.stage import Context
from slipway.texts import counted
from slipway_prepare.bitsandbytes_format import nf4_round_trip, read_bitsandbytes
from slipway_prepare.compressed_format import read_compressed
from slipway_prepare.faults import invalid_error, unsupported_error
from slipway_prepare.fp8_format import read_fp8
from slipway_prepare.gptq_format import read_awq, read_gptq
from slipway_prepare.mxfp4_format import read_mxfp4
from slipway_prepare.params import PrepareParams
from slipway_prepare.pickles.loading import check_tensors, load_pickle
from slipway_prepare.recipes import Base, Dequantized, Read, Recipe, account, write_weights
from slipway_prepare.source import open_source

READERS: Mapping[str, Callable[[Base], Dequantized]] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fp8,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}
"""Readers by ``quant_method``."""

_QUANTIZATION = ("quantization_config", "compression_config")
_LEFT_OUT = (*_QUANTIZATION, *LEFTOVERS)
_FLOAT_NAMES = {dtype: DTYPES[name].torch for name, dtype in torch_dtypes(*FLOATS).items()}


def prepare(folder: Path, output: Path, *, params: PrepareParams, ctx: Context) -> None:
    """Write the model in ``folder`` as a plain one into the new folder ``output``."""
    torch.set_num_threads(max(1, ctx.threads))
    config = ModelConfig.read(folder).of_type(params.model_type)
    quantization = config.quantization
    with open_source(folder, ctx.workdir) as source, torch.no_grad():
        base = Base(folder, config, quantization, source)
        made = _plan_dequantization(base)
        recipes = _orient_recipes(base, account(base, made, left_out=_ties(base)))
        _check_complete(base, recipes)
        if params.merge_onto == "nf4":
            recipes = _as_nf4(base, recipes, made)
        output.mkdir()
        _copy_small_files(folder, output, params, ctx)  # first, because a damaged tokenizer ends it
        size = write_weights(output, recipes, source, max_shard_bytes=params.max_shard_bytes, ctx=ctx)
    _write_config(output, config, recipes, changed=bool(made.recipes))
    ctx.record(
        source="safetensors" if has_safetensors(folder) else "pickle",
        weight_bytes=size,
        model_class=config.class_and_type,
    )
    _report(ctx, made, recipes, merge_onto=params.merge_onto)


def _copy_small_files(folder: Path, output: Path, params: PrepareParams, ctx: Context) -> None:
    if params.save_tokenizer:
        copy_companions(folder, output)
        _convert_modules(folder, output, ctx)
        _complete_tokenizer(folder, output, ctx)
        if codec := sound_codec(output):
            ctx.record(sound=dict(codec.facts))
    elif (folder / GENERATION_CONFIG).is_file():
        shutil.copyfile(real_file(folder, GENERATION_CONFIG), output / GENERATION_CONFIG)


def _complete_tokenizer(folder: Path, output: Path, ctx: Context) -> None:
    """Make the files that transformers reads of a tokenizer that is Mistral's ``tekken.json`` alone."""
    tekken = complete_tokenizer(output, source=folder)
    if tekken is None:
        return
    size = len(tekken.special) + len(tekken.tokens)
    ctx.record(tokenizer={"made_from": TEKKEN, "version": tekken.version, "tokens": size})
    if not has_chat_template(output):
        ctx.warn(
            f"the tokenizer is made from {TEKKEN}, which says nothing of how conversations are written, and the model has no "
            f"{' or '.join(CHAT_TEMPLATES)}: its outputs have no chat template"
        )


def _convert_modules(folder: Path, output: Path, ctx: Context) -> None:
    """Write pickled weights of a sentence encoder's modules as safetensors, in place of the copied pickles."""
    for path in pickled_modules(folder):
        place = output / path.relative_to(folder)
        place.unlink()
        values = check_tensors(load_pickle(real_file(folder, path.relative_to(folder)), ctx.workdir), path)
        save_file({name: value.contiguous().clone() for name, value in values.items()}, place.with_name(MODULE_WEIGHTS))


def _plan_dequantization(base: Base) -> Dequantized:
    if not base.quantization:
        return read_fp8(base)  # only changes the type of 8-bit floats, if there are any
    method = str(base.quantization.get("quant_method"))
    if method not in READERS:
        raise unsupported_error(f"is quantized by {method!r}; {', '.join(READERS)} are read", quant_method=method)
    return READERS[method](base)


def _ties(base: Base) -> list[str]:
    """Return the names to leave out: in the pickle, each shares a tensor with the name that the model ties it to.

    transformers saves such a tensor once, too.
    """
    if not base.source.aliases:
        return []
    tied = base.structure.tied
    left: list[str] = []
    for group in base.source.aliases:
        own = {base.structure.own_name(name): name for name in group}
        left += [name for model_name, name in sorted(own.items()) if tied.get(model_name) in own]
    return left


def _orient_recipes(base: Base, recipes: tuple[Recipe, ...]) -> tuple[Recipe, ...]:
    """Transpose the recipes of ``Conv1D`` weights: the model stores them (in, out), quantized formats (out, in).

    compressed-tensors stores a weight as the model does.
    """
    if base.quantization.get("quant_method") == "compressed-tensors":
        return recipes
    return tuple(_orient_recipe(base, recipe) if base.quantization else recipe for recipe in recipes)


def _orient_recipe(base: Base, recipe: Recipe) -> Recipe:
    build = recipe.build
    if build is None or base.structure.own_name(recipe.name) not in base.structure.transposed:
        return recipe
    return replace(recipe, shape=recipe.shape[::-1], build=lambda read: build(read).T)


def _check_complete(base: Base, recipes: tuple[Recipe, ...]) -> None:
    """Check, before any work, that every parameter of the model's class has a tensor of its shape.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``.
    """
    structure = base.structure
    missing = structure.missing_parameters([recipe.name for recipe in recipes])
    if missing:
        raise invalid_error(
            f"lacks {len(missing)} of its {len(structure.shapes)} tensors, first {missing[0]!r}", tensor=missing[0]
        )
    for recipe in recipes:
        expected = structure.shapes.get(recipe.name)
        if expected is not None and expected != recipe.shape:
            raise invalid_error(
                f"has {recipe.name!r} of shape {recipe.shape}, its config.json says {expected}", tensor=recipe.name
            )


def _as_nf4(base: Base, recipes: tuple[Recipe, ...], made: Dequantized) -> tuple[Recipe, ...]:
    if made.method.startswith("bitsandbytes") and "int8" not in made.method:
        return recipes  # these already are the NF4 weights
    if base.quantization:
        raise unsupported_error(
            f"is quantized ({made.method}), so an adapter with load_in_4bit was not trained on it",
            remedy="set merge_onto to original, or use the 16-bit version of the base model",
            quant_method=made.method,
        )
    if not base.config.get("architectures"):
        raise unsupported_error(
            "names no class in its config.json (architectures), and which layers load_in_4bit quantizes depends on it",
            remedy="set merge_onto to original, or name the class there",
        )
    names, transposed = base.structure.nf4, base.structure.transposed
    changed = tuple(
        _nf4(recipe, transposed=base.structure.own_name(recipe.name) in transposed)
        if base.structure.own_name(recipe.name) in names
        else recipe
        for recipe in recipes
    )
    if changed == recipes:
        raise unsupported_error("has no linear layer that load_in_4bit quantizes", remedy="set merge_onto to original")
    return changed


def _nf4(recipe: Recipe, *, transposed: bool) -> Recipe:
    inner, name = recipe.build, recipe.parts[0]

    def build(read: Read) -> torch.Tensor:
        weight = inner(read) if inner is not None else read(name)
        return nf4_round_trip(weight.T).T if transposed else nf4_round_trip(weight)

    return replace(recipe, build=build)


def _write_config(output: Path, config: Mapping[str, Any], recipes: tuple[Recipe, ...], *, changed: bool) -> None:
    plain = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = {key: value for key, value in plain["text_config"].items() if key not in _QUANTIZATION}
    if changed:
        sizes: dict[torch.dtype, int] = {}
        for recipe in recipes:
            if recipe.dtype in _FLOAT_NAMES and recipe.build is not None:
                sizes[recipe.dtype] = sizes.get(recipe.dtype, 0) + torch.Size(recipe.shape).numel()
        most = max(sorted(sizes, key=str), key=lambda dtype: sizes[dtype])
        key = "torch_dtype" if "torch_dtype" in plain and "dtype" not in plain else "dtype"
        plain[key] = _FLOAT_NAMES[most]
    (output / CONFIG).write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _report(ctx: Context, made: Dequantized, recipes: tuple[Recipe, ...], *, merge_onto: str) -> None:
    computed = [recipe for recipe in recipes if recipe.build is not None]
    ctx.record(
        method=made.method if made.recipes else "",
        details=dict(made.details) if made.recipes else {},
        merge_onto=merge_onto,
        tensors=len(recipes),
        computed=len(computed),
        dropped=len(made.dropped),
    )
    if made.recipes and merge_onto == "original":
        dtypes = sorted({_FLOAT_NAMES[recipe.dtype] for recipe in computed})
        ctx.warn(
            f"the base model is stored as {made.method}, dequantized to {', '.join(dtypes)} "
            f"({counted(len(made.recipes), 'weight')}); what quantization lost of the original weights stays lost"
        )
    if merge_onto == "nf4":
        ctx.warn(
            f"the adapter is merged onto the NF4 round trip of the base model ({counted(len(computed), 'linear layer')}), "
            "as it saw it in training with load_in_4bit; outputs are compared with that base"
        )

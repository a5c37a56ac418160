"""Merge two folders into a third: read, ask the model's code for facts, plan, write, judge, record.

The model's code is asked if an adapter changes weights that may be tied, if a square weight may be a transposed ``Conv1D``, if the
vocabulary was resized, and for the forms that peft merges. Plain LoRA on linear layers does not need it and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

from slipway.errors import ModelMergeError
from slipway.machine.shortages import translate_disk_full
from slipway.model.configuration import ModelConfig
from slipway.model.dtypes import FLOATS
from slipway.model.folder import ModelFolder
from slipway.model.model_facts import CannotBuildError, ModelFacts, model_facts, model_facts_of, remedy_of
from slipway.model.safetensors_file import TensorInfo
from slipway.model.tokens.sound import sound_codec
from slipway.model.trained import TrainedModel, trained_model
from slipway.stage import Context
from slipway_merge.adapter.adapter import Adapter, read_adapter
from slipway_merge.adapter.conversions import Headed, add_head
from slipway_merge.deferred import MergedWeights, describe_weights, reason_to_write
from slipway_merge.params import MergeParams
from slipway_merge.plan.embeddings import check_vocabulary
from slipway_merge.plan.plan import Planner
from slipway_merge.plan.replication import check_deeper, deeper_config
from slipway_merge.tensors.deltas import Change, arithmetic, is_zero
from slipway_merge.tensors.outputs import Layout, MergePlan, plan_layout
from slipway_merge.tensors.tensor_io import TensorReader
from slipway_merge.verify.spot_check import spot_check
from slipway_merge.writing.folder import DTYPE_NAMES, copy_small_files, merged_config, open_base, write_config
from slipway_merge.writing.output_file import Written
from slipway_merge.writing.writer import MergeWriter, relative_changes

#: Models up to this size are loaded by transformers in a few seconds.
SMALL_MODEL_BYTES = 256_000_000
_STORED_NAMES = {name: stored for stored, name in DTYPE_NAMES.items()}


def merge(base: Path, adapter_folder: Path, output: Path, *, params: MergeParams, ctx: Context) -> None:
    """Merge the adapter into the base model and write the result to ``output``, which must not exist.

    Raises:
        ModelMergeError, CheckpointValidationError: as listed in this service's README.
    """
    ctx.progress("check", done=0, total=0, unit="tensors")
    model = open_base(base)
    config, weights = model.config, dict(model.tensors)
    adapter = read_adapter(adapter_folder)
    trained = trained_model(model, adapter_folder)
    if trained is not None:
        config = trained.config
        _warn_of_labels(trained, ctx)

    facts = _Facts(config if trained else model)
    headed = add_head(weights, adapter, trained, facts("which weights its head has")) if trained else Headed(weights)
    with TensorReader() as reader, translate_disk_full(ModelMergeError, "for the merged model", at=output):
        planner = Planner(headed.tensors, config, adapter, facts, reader)
        plan = planner.plan()
        replaced = bool(headed.new) or _replaces_values(plan, planner, reader)
        if not replaced:
            _check_not_zero(plan, reader)
        dtype = None if params.dtype == "auto" else _STORED_NAMES[params.dtype]
        layout = plan_layout(plan.values, dtype=dtype, max_shard_bytes=params.max_shard_bytes)
        output.mkdir()
        written_dtype = DTYPE_NAMES[dtype or _main_dtype(layout)]
        new_config = _write_config(output, config, plan, dtype=written_dtype)
        made = ModelFolder(output, new_config)
        files = copy_small_files(model, adapter_folder, made, tokenizer=params.save_tokenizer)
        _check_fits(made, layout, plan, planner.naming.model_name)
        check_vocabulary(base, adapter_folder, new_config)
        limit = memory_limit(params.max_memory, allowed=ctx.max_memory_bytes)
        deferred = _may_defer(params, layout, ctx)
        writer = MergeWriter(output, reader, ctx, max_memory_bytes=limit, discard=deferred)
        written = writer.write(layout)
        inputs = {"base": base, "adapter": adapter_folder} if deferred else {}
        verified = _check_samples(output, layout, reader, inputs=inputs, replaced=plan.replaced, ctx=ctx)
    small = params.verify == "auto" and layout.data_bytes <= SMALL_MODEL_BYTES
    if not deferred and (params.verify == "full" or small):
        from slipway_merge.verify.reload_check import reload_check  # imports torch, transformers and peft

        stored = dtype or _STORED_NAMES[written_dtype]
        rounded = None if written.converted else {change.module for change in written.changes}
        names = planner.names_in_peft
        verified |= reload_check(
            made, model, adapter_folder, names=names, dtype=stored, rounded=rounded, trained=trained, ctx=ctx
        )
    for warning in plan.warnings:
        ctx.warn(warning)
    _judge(written, replaced, ctx)
    _record(ctx, adapter=adapter, layout=layout, plan=plan, written=written, weights=weights, dtype=written_dtype)
    ctx.record(weights="deferred" if deferred else "stored")
    ctx.record(
        model_class=new_config.class_and_type, small_files=files, verified=verified, shards_resumed=writer.resumed
    )
    if codec := sound_codec(output):
        ctx.record(sound=dict(codec.facts))
    if trained is not None:
        ctx.record(trained_as=str(trained), head=sorted(headed.new), tensors_dropped=list(headed.dropped))


def _may_defer(params: MergeParams, layout: Layout, ctx: Context) -> bool:
    """Return whether the weights should and can be left out."""
    why = reason_to_write(layout) if params.weights == "deferred" else ""
    if why:
        ctx.log.info(f"the weights are written: {why}")
    return params.weights == "deferred" and not why


def _check_samples(
    output: Path,
    layout: Layout,
    reader: TensorReader,
    *,
    inputs: Mapping[str, Path],
    replaced: Collection[str],
    ctx: Context,
) -> dict[str, Any]:
    """Check rows of every changed weight: in the written files or, with ``inputs``, as later stages will compute them."""

    def tell(done: int, total: int) -> None:
        ctx.progress("verify", done=done, total=total, unit="tensors")

    if not inputs:
        return spot_check(output, layout, reader, replaced=replaced, on_tensor=tell)
    describe_weights(output, layout, inputs)
    with closing(MergedWeights(output, inputs)) as weights:
        return weights.check_samples(tell)


class _Facts:
    """Ask the model's code, once and only if it is needed: this imports torch and transformers.

    Args:
        of: The model, or its configuration.
    """

    def __init__(self, of: ModelFolder | ModelConfig) -> None:
        self._of = of
        self._known: ModelFacts | None = None

    def __call__(self, why: str) -> ModelFacts:
        if self._known is None:
            self._known = facts_for(self._of, why=why)
        return self._known


def _write_config(output: Path, config: ModelConfig, plan: MergePlan, *, dtype: str) -> ModelConfig:
    """Write the merged model's ``config.json`` and return it."""
    merged = merged_config(config, dtype=dtype, untied=plan.untied, vocab_size=plan.vocab_size)
    if plan.layers:
        merged = deeper_config(merged, plan.layers)
    write_config(output, merged)
    return ModelConfig.read(output)


def _check_fits(made: ModelFolder, layout: Layout, plan: MergePlan, model_name: Callable[[str], str]) -> None:
    """Check changed shapes (vocabulary, tied weights, number of layers) against the model's code."""
    if plan.vocab_size is not None or plan.untied:
        _check_against_model(made, layout, plan, model_name)
    if plan.layers:
        check_deeper(facts_for(made, why="whether the repeated layers fit the model").model, plan.values, plan.layers)


def _warn_of_labels(trained: TrainedModel, ctx: Context) -> None:
    if not trained.named:
        last = trained.labels - 1
        ctx.warn(
            f"the checkpoint does not name the {trained.labels} labels of its {trained.name}, so they are LABEL_0 to LABEL_{last}: "
            "put the config.json of the trained model, with its id2label and problem_type, beside adapter_config.json"
        )


def memory_limit(wanted: int | None, *, allowed: int) -> int:
    """Return the working memory in bytes: the requested amount or a quarter of the free memory, at most the task's limit."""
    return min(wanted if wanted is not None else psutil.virtual_memory().available // 4, allowed)


def _main_dtype(layout: Layout) -> str:
    """Return the floating-point type with the most bytes."""
    sizes: dict[str, int] = {}
    for tensor in layout.tensors():
        if tensor.dtype in FLOATS:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    if not sizes:
        raise ModelMergeError(
            "the base model has no floating-point weights",
            reason="DTYPE_UNSUPPORTED",
            remedy="use a 16-bit or 32-bit version of the model",
        )
    return max(sorted(sizes), key=lambda dtype: sizes[dtype])


def _replaces_values(plan: MergePlan, planner: Planner, reader: TensorReader) -> bool:
    """Return whether any tensor that the adapter replaces differs from the base's."""
    pairs = [(plan.values[name].source, planner.base_tensor(name)) for name in plan.replaced]
    return any(before is None or not reader.same(now, before) for now, before in pairs)


def _check_not_zero(plan: MergePlan, reader: TensorReader) -> None:
    """Check before anything is written that at least one update is not zero.

    Raises:
        ModelMergeError: ``ADAPTER_NO_EFFECT``, or ``NON_FINITE_WEIGHTS`` for an adapter with NaN or infinity.
    """
    updates = [value.update for value in plan.values.values() if value.update is not None]
    computed = any(value.computed is not None for value in plan.values.values())
    if computed or not all(is_zero(update, reader) for update in updates):
        return
    causes = []
    if updates:
        causes.append(f"all {len(updates)} updates of the adapter are zero (one factor of each pair is all zeros)")
    if plan.replaced:
        causes.append(f"the weights that it replaces ({len(plan.replaced)}) have the base's values")
    first = f", first {updates[0].module!r}" if updates else ""
    raise ModelMergeError(
        f"{' and '.join(causes)}{first}: it was never trained, or its weights were not gathered when it was saved",
        reason="ADAPTER_NO_EFFECT",
        remedy="use a later checkpoint",
        about={"module": updates[0].module if updates else ""},
    )


def _check_against_model(made: ModelFolder, layout: Layout, plan: MergePlan, model_name: Callable[[str], str]) -> None:
    """Check that the model built from the new configuration has the written shapes, and ties no weights whose values differ.

    Raises:
        ModelMergeError: ``ADAPTER_BASE_MISMATCH`` or ``ADAPTER_UNSUPPORTED``.
    """
    facts = facts_for(made, why="whether the changed weights fit the model")
    resized = plan.vocab_size is not None
    for tensor in layout.tensors():
        expected = facts.shapes.get(model_name(tensor.name), facts.shapes.get(tensor.name))
        if expected is not None and expected != tensor.shape:
            raise ModelMergeError(
                f"by the merged model's config.json {tensor.name!r} should be {expected} but is {tensor.shape}"
                + (": the adapter does not have all weights of the resized vocabulary" if resized else ""),
                reason="ADAPTER_BASE_MISMATCH",
                remedy="save the adapter again with save_embedding_layers=True"
                if resized
                else "use a base model whose config.json belongs to its weights",
                about={"tensor": tensor.name, "shape": tensor.shape, "expected": expected},
            )
    written = {model_name(name): value for name, value in plan.values.items()}
    still = [group for group in facts.groups() if len({id(written[name]) for name in group if name in written}) > 1]
    if plan.untied and still:
        raise ModelMergeError(
            f"the adapter changes {', '.join(still[0])} differently, but this architecture always ties them",
            reason="ADAPTER_UNSUPPORTED",
            remedy="train the adapter on one of them, or leave them out",
            about={"tensor": still[0][0]},
        )


def _judge(written: Written, replaced: bool, ctx: Context) -> None:
    """Refuse a result that equals the base; warn of modules whose change was lost in rounding.

    Raises:
        ModelMergeError: ``ADAPTER_NO_EFFECT``.
    """
    lost = sorted(change.module for change in written.changes if change.changed == 0)
    if written.changes and len(lost) == len(written.changes) and not replaced:
        raise ModelMergeError(
            f"the merged model equals the base: all {len(lost)} updates vanish in the rounding of the output's data type "
            f"(largest relative change {max(change.relative_change for change in written.changes):.2g})",
            reason="ADAPTER_NO_EFFECT",
            remedy="merge with dtype float32, or use a later checkpoint",
            about={"module": lost[0]},
        )
    if lost:
        shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        ctx.warn(f"{len(lost)} of {len(written.changes)} merged modules are unchanged after rounding: {shown}")


def _record(
    ctx: Context,
    *,
    adapter: Adapter,
    layout: Layout,
    plan: MergePlan,
    written: Written,
    weights: dict[str, TensorInfo],
    dtype: str,
) -> None:
    changes: list[Change] = written.changes
    total = sum(change.total for change in changes)
    facts: dict[str, Any] = {
        "dtype": dtype,
        "arithmetic": arithmetic(),
        "base_bytes": sum(info.nbytes for info in weights.values()),
        "adapter_bytes": sum(info.nbytes for info in adapter.tensors()),
        "output_bytes": sum(shard.nbytes for shard in layout.shards),
        "tensors_merged": len(changes),
        "tensors_copied": written.copied,
        "tensors_converted": written.converted,
        "tensors_replaced": list(plan.replaced),
        "adapter_tensors": len(adapter.tensors()),
        "scalings": sorted({change.scaling for change in changes if change.scaling is not None}),
        "ranks": sorted({change.rank for change in changes if change.rank is not None}),
        "untied": plan.untied,
        "vocab_size": plan.vocab_size,
        "unchanged_share": round(sum(c.total - c.changed for c in changes) / total, 6) if total else None,
        "modules": relative_changes(changes),
    }
    ctx.record(**facts)


def facts_for(model: ModelFolder | ModelConfig, *, why: str) -> ModelFacts:
    """Return facts about a model.

    Args:
        model: The model, or the content of its ``config.json``.
        why: The purpose; part of the error.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` if transformers cannot build this model.
    """
    stored, config = (model, model.config) if isinstance(model, ModelFolder) else (None, model)
    try:
        return model_facts(stored) if stored else model_facts_of(config)
    except CannotBuildError as error:
        raise ModelMergeError(
            f"cannot tell {why}, because transformers cannot build the base model: {error}",
            reason="ADAPTER_UNSUPPORTED",
            remedy=remedy_of(config),
            about={"file": stored.path / "config.json"} if stored else {},
        ) from error

"""Merge two folders into a third: read, ask the model's code for facts, plan, write, judge, record.

The model's code is asked if an adapter changes weights that may be tied, if a square weight may be a transposed ``Conv1D``, if the
vocabulary was resized, and for the forms that peft merges. Plain LoRA on linear layers does not need it and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
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
from slipway_merge.conclusion import Results, conclude
from slipway_merge.deferred import MergedWeights
from slipway_merge.description import describe_weights, reason_to_write
from slipway_merge.params import MergeParams
from slipway_merge.plan.embeddings import check_vocabulary
from slipway_merge.plan.plan import Planner
from slipway_merge.plan.replication import check_deeper, deeper_config
from slipway_merge.tensors.deltas import arithmetic, is_zero
from slipway_merge.tensors.outputs import Layout, MergePlan, plan_layout
from slipway_merge.tensors.tensor_io import TensorReader
from slipway_merge.verify.spot_check import spot_check
from slipway_merge.writing.folder import DTYPE_NAMES, copy_small_files, merged_config, open_base, write_config
from slipway_merge.writing.output_file import Written
from slipway_merge.writing.writer import MergeWriter

#: Models up to this size are loaded by transformers in a few seconds.
SMALL_MODEL_BYTES = 256_000_000
_STORED_NAMES = {name: stored for stored, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class PlannedMerge:
    """A merge before its weights are written, with the small files of its output.

    Attributes:
        base: Folder of the base model.
        adapter_folder: Folder of the adapter.
        model: The base model.
        made: The output folder with its configuration.
        plan: The plan of all output tensors.
        layout: The files of the weights.
        reader: Reads stored tensors; open as long as the context of :func:`plan_merge`.
        adapter: The parsed adapter.
        trained: The class that the adapter was trained as, if it is another than the base's.
        names: Returns the names of the adapter's tensors in peft.
        replaced: Whether the adapter brings values that differ from the base's.
        deferred: Whether the weights are left out.
        facts: Facts for the report that do not depend on the written weights.
        warnings: Warnings for the user.
    """

    base: Path
    adapter_folder: Path
    model: ModelFolder
    made: ModelFolder
    plan: MergePlan
    layout: Layout
    reader: TensorReader
    adapter: Adapter
    trained: TrainedModel | None
    names: Callable[[], dict[str, str]]
    replaced: bool
    deferred: bool
    facts: dict[str, Any]
    warnings: tuple[str, ...]

    def write(self, layout: Layout, folder: Path, *, params: MergeParams, ctx: Context) -> Results:
        """Write files of the layout into a folder and check rows of every changed weight; return what is known of them.

        Raises:
            ModelMergeError, CheckpointValidationError: as listed in this service's README.
        """

        def tell(done: int, total: int) -> None:
            ctx.progress("verify", done=done, total=total, unit="tensors")

        if self.deferred:
            return self._describe(layout, tell, threads=ctx.threads)
        limit = memory_limit(params.max_memory, allowed=ctx.max_memory_bytes)
        writer = MergeWriter(folder, self.reader, ctx, max_memory_bytes=limit)
        written = writer.write(layout)
        verified = spot_check(folder, layout, self.reader, replaced=self.plan.replaced, on_tensor=tell)
        return Results(written, verified, writer.resumed)

    def _describe(self, layout: Layout, tell: Callable[[int, int], None], *, threads: int) -> Results:
        """Describe all weights instead of writing them; check rows of the layout's weights as later stages will compute them."""
        inputs = {"base": self.base, "adapter": self.adapter_folder}
        describe_weights(self.made.path, self.layout, inputs)
        names = {tensor.name for tensor in layout.tensors()}
        with closing(MergedWeights(self.made.path, inputs)) as weights:
            changes, verified = weights.check_samples(tell, names=names, threads=threads)
        copied, converted = sum(s.copied for s in layout.shards), sum(s.converted for s in layout.shards)
        return Results(Written(changes, copied, converted), verified)


def merge(base: Path, adapter_folder: Path, output: Path, *, params: MergeParams, ctx: Context) -> None:
    """Merge the adapter into the base model and write the result to ``output``, which must not exist.

    Raises:
        ModelMergeError, CheckpointValidationError: as listed in this service's README.
    """
    with plan_merge(base, adapter_folder, output, params=params, ctx=ctx) as planned:
        results = planned.write(planned.layout, output, params=params, ctx=ctx)
    small = params.verify == "auto" and planned.layout.data_bytes <= SMALL_MODEL_BYTES
    if not planned.deferred and (params.verify == "full" or small):
        from slipway_merge.verify.reload_check import reload_check  # imports torch, transformers and peft

        results.verified |= reload_check(
            planned.made,
            planned.model,
            adapter_folder,
            names=planned.names,
            dtype=_STORED_NAMES[planned.facts["dtype"]],
            rounded=None if results.written.converted else {change.module for change in results.written.changes},
            trained=planned.trained,
            ctx=ctx,
        )
    conclude(results, planned.facts, replaced=planned.replaced, warnings=planned.warnings, ctx=ctx)


@contextmanager
def plan_merge(
    base: Path, adapter_folder: Path, output: Path, *, params: MergeParams, ctx: Context
) -> Iterator[PlannedMerge]:
    """Plan a merge, check that it fits, and write the small files into ``output``, which must not exist.

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
        deferred = _may_defer(params, layout, ctx)
        known = _known_facts(adapter=adapter, layout=layout, plan=plan, weights=weights, dtype=written_dtype) | {
            "weights": "deferred" if deferred else "stored",
            "changes_measured_on": "samples" if deferred else "all values",
            "model_class": new_config.class_and_type,
            "small_files": files,
        }
        if codec := sound_codec(output):
            known["sound"] = dict(codec.facts)
        if trained is not None:
            known |= {
                "trained_as": str(trained),
                "head": sorted(headed.new),
                "tensors_dropped": list(headed.dropped),
            }
        yield PlannedMerge(
            base=base,
            adapter_folder=adapter_folder,
            model=model,
            made=made,
            plan=plan,
            layout=layout,
            reader=reader,
            adapter=adapter,
            trained=trained,
            names=planner.names_in_peft,
            replaced=replaced,
            deferred=deferred,
            facts=known,
            warnings=(*_warnings_of_labels(trained), *plan.warnings),
        )


def _may_defer(params: MergeParams, layout: Layout, ctx: Context) -> bool:
    """Return whether the weights should and can be left out."""
    why = reason_to_write(layout) if params.weights == "deferred" else ""
    if why:
        ctx.log.info(f"the weights are written: {why}")
    return params.weights == "deferred" and not why


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


def _warnings_of_labels(trained: TrainedModel | None) -> tuple[str, ...]:
    if trained is None or trained.named:
        return ()
    last = trained.labels - 1
    warning = (
        f"the checkpoint does not name the {trained.labels} labels of its {trained.name}, so they are LABEL_0 to LABEL_{last}: "
        "put the config.json of the trained model, with its id2label and problem_type, beside adapter_config.json"
    )
    return (warning,)


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


def _known_facts(
    *, adapter: Adapter, layout: Layout, plan: MergePlan, weights: dict[str, TensorInfo], dtype: str
) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "arithmetic": arithmetic(),
        "base_bytes": sum(info.nbytes for info in weights.values()),
        "adapter_bytes": sum(info.nbytes for info in adapter.tensors()),
        "output_bytes": sum(shard.nbytes for shard in layout.shards),
        "tensors_replaced": list(plan.replaced),
        "adapter_tensors": len(adapter.tensors()),
        "untied": plan.untied,
        "vocab_size": plan.vocab_size,
    }


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

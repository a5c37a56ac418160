"""Replace rows of embeddings, decide which weights stay tied, and check that every token of the tokenizer has a row.

Tied weights share a storage, such as an ``lm_head`` and the embedding; an adapter's changes may make them differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slipway.errors import ModelMergeError
from slipway.files.json_documents import read_object_or_empty
from slipway.model.adapters.adapter_config import UNMERGED_REMEDY, AdapterConfig, misfit, unsupported
from slipway.model.configuration import ModelConfig
from slipway.model.safetensors_file import TensorInfo
from slipway_merge.adapter.adapter import Adapter, WholeTensor
from slipway_merge.adapter.checks import check_rows
from slipway_merge.adapter.naming import Naming
from slipway_merge.tensors.outputs import Alteration, Computed, Factor, Update, Value
from slipway_merge.tensors.tensor_io import SAMPLE_ROWS, TensorReader, read_rows, sampled_rows, share_of_rounding

if TYPE_CHECKING:
    from slipway.model.model_facts import ModelFacts

#: Returns the adapter's replacement for a weight of this name and shape, checked to fit.
Replacement = Callable[[str, WholeTensor, tuple[int, ...]], TensorInfo]


def check_no_bias(config: AdapterConfig, name: str, bias: TensorInfo | None, reader: TensorReader) -> None:
    """Check that a head with replaced rows has no bias: peft ignores the bias in training and uses it again after the merge.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED``.
    """
    if bias is not None and reader.read(bias).any():
        raise unsupported(
            "trainable_token_indices",
            config.tokens,
            f"they are rows of {name!r} too, and peft trains those without the layer's bias {bias.name!r}",
            remedy=UNMERGED_REMEDY,
        )


def replace_rows(module: str, info: TensorInfo, rows: tuple[int, ...], source: TensorInfo) -> Value:
    """Return the weight with its ``rows`` replaced by those of ``info``.

    Raises:
        ModelMergeError: ``ADAPTER_BASE_MISMATCH`` if a row does not exist or has another width.
    """
    if len(source.shape) != 2 or info.shape[1:] != source.shape[1:] or max(rows, default=0) >= source.shape[0]:
        raise misfit(
            f"adapter tensor {info.name!r} {info.shape} replaces rows up to {max(rows, default=0)} of {source.name!r} "
            f"{source.shape}, which do not fit",
            tensor=info.name,
            shape=info.shape,
            base_shape=source.shape,
        )

    def compute(dtype: np.dtype[np.floating]) -> np.ndarray:
        from slipway_merge.peft.modules import read_finite, read_widened

        weight = read_widened(source, dtype)
        weight[list(rows)] = read_finite(info, "the adapter").to(weight.dtype)
        values: np.ndarray = weight.numpy()
        return values

    def error(written: TensorInfo) -> float:
        kept = [row for row in sampled_rows(written) if row not in set(rows)]
        replaced = list(range(0, len(rows), 1 + len(rows) // SAMPLE_ROWS))
        with TensorReader() as reader:
            expected = np.concatenate([read_rows(reader, source, kept), read_rows(reader, info, replaced)])
            values = read_rows(reader, written, [*kept, *(rows[place] for place in replaced)])
        return share_of_rounding(values, expected, written.dtype)

    return Value(source, computed=Computed(module, "rows", compute, error, tensors=(info,)))


def check_vocabulary(base: Path, adapter: Path, config: ModelConfig) -> None:
    """Check that the checkpoint's tokenizer has no id beyond the merged embedding, unless the base's tokenizer has one too.

    Raises:
        ModelMergeError: ``ADAPTER_BASE_MISMATCH``.
    """
    rows, highest = config.vocabulary, highest_token_id(adapter)
    if rows is None or highest is None or highest < rows:
        return
    before = highest_token_id(base)
    if before is not None and before >= highest:
        return
    raise ModelMergeError(
        f"the checkpoint's tokenizer has token ids up to {highest}, but the model has {rows} embeddings: the vocabulary "
        "was resized and the new embeddings are not in the adapter",
        reason="ADAPTER_BASE_MISMATCH",
        remedy="save the adapter again with save_embedding_layers=True, or with the base's own tokenizer",
        about={"file": adapter / "tokenizer.json", "vocab_size": rows},
    )


def highest_token_id(folder: Path) -> int | None:
    """Return the highest token id in a folder's ``tokenizer.json``; None without one."""
    tokenizer = read_object_or_empty(folder / "tokenizer.json")
    added = tokenizer.get("added_tokens")
    ids = [entry.get("id") for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        ids.extend(vocabulary.values())
    elif isinstance(vocabulary, list):
        ids.append(len(vocabulary) - 1)
    return max((value for value in ids if isinstance(value, int)), default=None)


@dataclass(frozen=True, slots=True)
class Settled:
    """Values of a group's written members, and whether they differ now."""

    values: Mapping[str, Value]
    untied: bool


@dataclass(frozen=True, slots=True)
class Ties:
    """Finds the tied weights that an adapter changes, and decides their values.

    Args:
        base: Tensors of the base model by stored name.
        adapter: The parsed adapter.
        form_weights: Parameters of the modules that peft merges.
        naming: Translates names of weights.
        reader: Compares stored tensors.
    """

    base: Mapping[str, TensorInfo]
    adapter: Adapter
    form_weights: tuple[str, ...]
    naming: Naming
    reader: TensorReader

    def groups(self, vocab_size: int | None, facts: Callable[[str], ModelFacts]) -> list[list[str]]:
        """Return the groups of output names that share a storage and that the adapter changes.

        Like transformers, treat a weight that the base stores twice as tied only if both copies are equal.
        """
        touched = self._changed_names()
        if not self._may_be_tied(touched, vocab_size):
            return []
        named = [
            [self.naming.output_from_model(name) for name in group]
            for group in facts("which weights are tied").groups()
        ]
        groups = [self._keep_tied(group) for group in named if touched & set(group)]
        return [group for group in groups if len(group) > 1 and touched & set(group)]

    def settle(self, group: list[str], changes: Mapping[str, Alteration], replacement: Replacement) -> Settled:
        """Decide one group: one value for all its stored members, or one for each member.

        Raises:
            ModelMergeError: ``CHECKPOINT_INCOMPLETE`` for an adapter that claims to keep weights tied but changes only some,
                ``ADAPTER_CONFIG_INVALID`` for one whose saved modules nevertheless differ.
        """
        written = [name for name in group if name in self.base]
        source = self.base[written[0]]
        members = dict.fromkeys(group, Value(source))
        whole = {
            name: tensor for tensor in self.adapter.whole.values() if (name := self.naming.output(tensor.name)) in group
        }
        for name, tensor in sorted(
            whole.items(), key=lambda item: item[1].own
        ):  # shared tensors first, then a member's own
            info = replacement(name, tensor, members[name].source.shape)
            alone = tensor.own or sum(not other.own for other in whole.values()) > 1
            for member in [name] if alone else group:
                members[member] = Value(info)
        for name in group:
            if name in changes:
                members[name] = changes[name](members[name].source)
        changed = [name for name in group if name in changes or members[name].source is not source]
        if not changed:
            return Settled({}, untied=False)
        self._check_rows_alone(group, changes)
        sources = [members[name].source for name in changed]
        same = all(info is sources[0] or self.reader.same(sources[0], info) for info in sources[1:])
        if (
            group[0] in changed and same and self._are_same_rows(changed)
        ):  # peft gives an embedding's rows to all its ties
            return Settled(dict.fromkeys(written, members[group[0]]), untied=False)
        self._check_rows_there(group)
        if self.adapter.config.ties_embeddings:
            self._check_all_trained(group, whole, changes)
        if self._are_all_same(list(members.values())):
            return Settled(dict.fromkeys(written, members[written[0]]), untied=False)
        return Settled(members, untied=True)

    def _check_rows_alone(self, group: list[str], changes: Mapping[str, Alteration]) -> None:
        """Refuse rows of an embedding if a tied weight has another change: peft applies that change on top of the rows."""
        with_rows = {self.naming.output(f"{module}.weight") for module in self.adapter.rows}
        more = [name for name in group if name in changes and name not in with_rows]
        if group[0] in with_rows and more:
            raise unsupported(
                "trainable_token_indices",
                self.adapter.config.raw.get("trainable_token_indices"),
                f"{more[0]!r} is tied to {group[0]!r}, so it has these rows too, and more is trained on top of them",
                remedy=UNMERGED_REMEDY,
            )

    def _check_rows_there(self, group: list[str]) -> None:
        """Check, for tied weights with different rows, that each named one has its own rows in the checkpoint."""
        tokens = self.adapter.config.tokens
        with_rows = {self.naming.output(f"{module}.weight") for module in self.adapter.rows}
        for name in group if isinstance(tokens, Mapping) and with_rows & set(group) else ():
            module = self.naming.model_name(name).removesuffix(".weight")
            if name not in with_rows and any(f".{module}".endswith(f".{key}") for key in tokens):
                raise unsupported(
                    "trainable_token_indices",
                    self.adapter.config.raw.get("trainable_token_indices"),
                    f"the checkpoint has no rows for {module!r}, which is tied to weights whose rows differ",
                    remedy=UNMERGED_REMEDY,
                )

    def _check_all_trained(
        self, group: list[str], whole: Mapping[str, WholeTensor], changes: Mapping[str, Alteration]
    ) -> None:
        """Check that the adapter has tensors for all weights that were trained as one.

        They need not be equal: peft shares them in memory, but stops sharing when it converts 16-bit ones to float32. From then on each
        is trained separately.
        """
        saved = [whole[name].info for name in group if name in whole]
        if any(tensor.own for tensor in whole.values()):  # a module to save stays one object in any type
            for other in saved[1:]:
                if not self.reader.same(saved[0], other):
                    raise ModelMergeError(
                        f"adapter tensors {saved[0].name!r} and {other.name!r} were trained as one (ensure_weight_tying) but differ",
                        reason="ADAPTER_CONFIG_INVALID",
                        remedy="copy the checkpoint again, with the adapter_config.json that was saved with its weights",
                        about={"tensor": other.name},
                    )
        trained = [name for name in group if name in changes or (name in whole and whole[name].own)]
        left = [name for name in group if name not in changes and name not in whole]
        if trained and left:
            raise ModelMergeError(
                f"the adapter's ensure_weight_tying is true and it changes {trained[0]!r}, but the checkpoint holds no tensor "
                f"for {left[0]!r}, which is tied to it",
                reason="CHECKPOINT_INCOMPLETE",
                remedy="copy the checkpoint again, with the adapter_config.json that was saved with its weights",
                about={"key": "ensure_weight_tying", "tensor": left[0]},
            )

    def _changed_names(self) -> set[str]:
        weights = (f"{module}.weight" for module in [*self.adapter.pairs, *self.adapter.rows])
        return {self.naming.output(name) for name in [*weights, *self.form_weights, *self.adapter.whole]}

    def _may_be_tied(self, touched: set[str], vocab_size: int | None) -> bool:
        """Return whether any changed weight may be an embedding, so that the model must be asked."""
        pairs = self.adapter.pairs.items()
        if any(pair.embedding and self.naming.output(f"{module}.weight") in touched for module, pair in pairs):
            return True
        infos = [self.base.get(name) for name in touched]
        return any(info is None or vocab_size is None or vocab_size in info.shape for info in infos)

    def _keep_tied(self, group: list[str]) -> list[str]:
        """Return the members of a group that are not stored, or stored with the same values as the first stored one."""
        first = next((self.base[name] for name in group if name in self.base), None)
        if first is None:
            return []
        return [name for name in group if name not in self.base or self.reader.same(first, self.base[name])]

    def _are_same_rows(self, names: list[str]) -> bool:
        """Return whether the only change of these weights is the same replacement of the same rows."""
        rows = {self.naming.output(f"{module}.weight"): (module, info) for module, info in self.adapter.rows.items()}
        if not rows.keys() >= set(names):
            return False
        replacements = [rows[name] for name in names]
        numbers = {check_rows(self.adapter.config, module, info) for module, info in replacements}
        return len(numbers) == 1 and all(self.reader.same(replacements[0][1], info) for _, info in replacements[1:])

    def _are_all_same(self, values: list[Value]) -> bool:
        """Return whether all have equal sources and get the same product added."""
        first = values[0]
        return all(
            value.computed is None
            and (value.source is first.source or self.reader.same(first.source, value.source))
            and self._are_same_products(first.update, value.update)
            for value in values
        )

    def _are_same_products(self, first: Update | None, second: Update | None) -> bool:
        if first is None or second is None:
            return first is second
        if first.scaling != second.scaling:
            return False
        return self._are_same(first.left, second.left) and self._are_same(first.right, second.right)

    def _are_same(self, first: Factor, second: Factor) -> bool:
        """Return whether two factors are equal; an embedding's factors are stored transposed."""
        if first.transposed == second.transposed:
            return self.reader.same(first.info, second.info)
        return np.array_equal(self.reader.read(first.info), self.reader.read(second.info).T)


def write_untied(values: dict[str, Value], groups: Iterable[list[str]], naming: Naming) -> None:
    """Write every other tied weight (the bias of BERT's head) under all its names, because an untied model ties none.

    Args:
        values: Values by output name; extended.
        groups: Names that share a storage in the base model.
        naming: Translates them.
    """
    for group in groups:
        names = [naming.output_from_model(name) for name in group]
        shared = next((values[name] for name in names if name in values), None)
        if shared is not None:
            values.update({name: shared for name in names if name not in values})

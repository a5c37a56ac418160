"""Weights that share a storage (an ``lm_head`` tied to the embedding): whether they still can after the adapter's changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slipway.errors import ModelMergeError
from slipway.models.safetensors_file import TensorInfo
from slipway_merge.adapter.adapter import Adapter, WholeTensor
from slipway_merge.adapter.completeness import check_rows
from slipway_merge.adapter.naming import Naming
from slipway_merge.tensors.tensor_io import TensorReader
from slipway_merge.tensors.values import Alteration, Factor, Update, Value
from slipway_merge.unsupported import UNMERGED_REMEDY, unsupported

if TYPE_CHECKING:
    from slipway.models.model_facts import ModelFacts

#: A tensor of the adapter that replaces a weight of the given name and shape, checked to fit.
Replacement = Callable[[str, WholeTensor, tuple[int, ...]], TensorInfo]


@dataclass(frozen=True, slots=True)
class Settled:
    """What the members of a group hold that are written, and whether they came to differ."""

    values: Mapping[str, Value]
    untied: bool


@dataclass(frozen=True, slots=True)
class Ties:
    """Finds the tied weights that an adapter touches, and settles what becomes of them.

    Args:
        base: Tensors of the base model by stored name.
        adapter: The parsed adapter.
        form_weights: Parameters of the modules that peft merges.
        naming: Translates what the adapter and the model call a weight.
        reader: Compares stored tensors.
    """

    base: Mapping[str, TensorInfo]
    adapter: Adapter
    form_weights: tuple[str, ...]
    naming: Naming
    reader: TensorReader

    def groups(self, vocab_size: int | None, facts: Callable[[str], ModelFacts]) -> list[list[str]]:
        """Groups of output names that share a storage, of which the adapter touches at least one.

        A weight that the base stores twice counts as tied only where both hold the same: so does transformers when it
        loads them.
        """
        touched = self._touched()
        if not self._may_be_tied(touched, vocab_size):
            return []
        named = [[self.naming.of_model(name) for name in group] for group in facts("which weights are tied").groups()]
        groups = [self._really_tied(group) for group in named if touched & set(group)]
        return [group for group in groups if len(group) > 1 and touched & set(group)]

    def settle(self, group: list[str], changes: Mapping[str, Alteration], replacement: Replacement) -> Settled:
        """Decide one group: one value for all its stored members, or one for each member.

        Raises:
            ModelMergeError: ``CHECKPOINT_INCOMPLETE`` for an adapter that says it keeps weights tied but changes only some,
                ``ADAPTER_CONFIG_INVALID`` for one whose saved modules differ all the same.
        """
        written = [name for name in group if name in self.base]
        source = self.base[written[0]]
        members = dict.fromkeys(group, Value(source))
        whole = {
            name: tensor for tensor in self.adapter.whole.values() if (name := self.naming.output(tensor.name)) in group
        }
        for name, tensor in sorted(whole.items(), key=lambda item: item[1].own):  # what all share, then a member's own
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
        if self._all_same(list(members.values())):
            return Settled(dict.fromkeys(written, members[written[0]]), untied=False)
        return Settled(members, untied=True)

    def _check_rows_alone(self, group: list[str], changes: Mapping[str, Alteration]) -> None:
        """Peft puts an embedding's rows into every weight tied to it, below whatever else is trained there."""
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
        """Of tied weights with rows that are not the same, each that the configuration names has its own in the checkpoint."""
        tokens = self.adapter.config.tokens
        with_rows = {self.naming.output(f"{module}.weight") for module in self.adapter.rows}
        for name in group if isinstance(tokens, Mapping) and with_rows & set(group) else ():
            module = self.naming.modelled(name).removesuffix(".weight")
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
        """Of weights that were trained as one, the adapter has tensors for all.

        They need not be the same: peft shares them in memory, and loses that when it turns 16-bit ones into float32. Then
        each was trained with its own.
        """
        saved = [whole[name].info for name in group if name in whole]
        if any(tensor.own for tensor in whole.values()):  # a module to save is one object, whatever it is converted to
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

    def _touched(self) -> set[str]:
        weights = (f"{module}.weight" for module in [*self.adapter.pairs, *self.adapter.rows])
        return {self.naming.output(name) for name in [*weights, *self.form_weights, *self.adapter.whole]}

    def _may_be_tied(self, touched: set[str], vocab_size: int | None) -> bool:
        """Return whether any touched weight is an embedding or like one, so that the model has to be asked."""
        pairs = self.adapter.pairs.items()
        if any(pair.embedding and self.naming.output(f"{module}.weight") in touched for module, pair in pairs):
            return True
        infos = [self.base.get(name) for name in touched]
        return any(info is None or vocab_size is None or vocab_size in info.shape for info in infos)

    def _really_tied(self, group: list[str]) -> list[str]:
        """Return the members of a group that are not stored, or stored with the values of the first that is."""
        first = next((self.base[name] for name in group if name in self.base), None)
        if first is None:
            return []
        return [name for name in group if name not in self.base or self.reader.same(first, self.base[name])]

    def _are_same_rows(self, names: list[str]) -> bool:
        """Return whether all that happens to these weights is that the same rows of each are replaced by the same values."""
        rows = {self.naming.output(f"{module}.weight"): (module, info) for module, info in self.adapter.rows.items()}
        if not rows.keys() >= set(names):
            return False
        found = [rows[name] for name in names]
        numbers = {check_rows(self.adapter.config, module, info) for module, info in found}
        return len(numbers) == 1 and all(self.reader.same(found[0][1], info) for _, info in found[1:])

    def _all_same(self, values: list[Value]) -> bool:
        """Return whether all hold the same, and the same product is added to each."""
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
        """Return whether two factors hold the same; those of an embedding are stored transposed."""
        if first.transposed == second.transposed:
            return self.reader.same(first.info, second.info)
        return np.array_equal(self.reader.read(first.info), self.reader.read(second.info).T)


def give_each_its_own(values: dict[str, Value], groups: Iterable[list[str]], naming: Naming) -> None:
    """Return what else was tied is not in an untied model, so it is written under every name (the bias of BERT's head).

    Args:
        values: What is written, by output name; added to.
        groups: Names that share a storage in the base model.
        naming: Translates them.
    """
    for group in groups:
        names = [naming.of_model(name) for name in group]
        shared = next((values[name] for name in names if name in values), None)
        if shared is not None:
            values.update({name: shared for name in names if name not in values})

"""The merge decided before a byte is read: for every output tensor where it comes from and what is added to it.

Accounting happens here. Every base tensor becomes one output tensor, every adapter tensor is used once, and every shape is
compared, so that what starts to be written is known to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from slipway.errors import ModelMergeError
from slipway.safetensors_file import TensorInfo
from slipway_merge.adapter import Adapter, Pair, WholeTensor
from slipway_merge.names import NameMap, fit_names
from slipway_merge.values import Factor, MergePlan, Update, Value

if TYPE_CHECKING:
    from slipway_merge.model_facts import ModelFacts


@dataclass
class Planner:
    """Builds a :class:`MergePlan`.

    Args:
        base: Tensors of the base model by stored name.
        config: Its ``config.json``.
        adapter: The parsed adapter.
        facts: Asks transformers about the model; called at most once, and only when needed. Its argument says what for.
        same: Whether two stored tensors hold the same values.
    """

    base: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    adapter: Adapter
    facts: Callable[[str], ModelFacts]
    same: Callable[[TensorInfo, TensorInfo], bool]
    warnings: list[str] = field(default_factory=list)

    def plan(self) -> MergePlan:
        """The merge, or why it cannot be done.

        Raises:
            ModelMergeError: ``ADAPTER_TENSOR_UNUSED``, ``ADAPTER_BASE_MISMATCH``, ``ADAPTER_UNSUPPORTED`` or
                ``CHECKPOINT_INCOMPLETE``.
        """
        values = {name: Value(info) for name, info in self.base.items()}
        groups = self._touched_groups()
        grouped = {member for group in groups for member in group}
        for whole in self.adapter.whole.values():
            if (name := self._output_name(whole.name)) not in grouped:
                self._stored(name, whole.info)
                values[name] = Value(self._checked_replacement(name, whole, self.base[name].shape))
        for pair in self.adapter.pairs.values():
            if (name := self._weight(pair)) not in grouped:
                self._stored(name, pair.a)
                values[name] = Value(values[name].source, self._update(pair, name, values[name].source.shape))
        untied = [self._plan_group(values, group) for group in groups]
        self._warn_of_ambiguous_alphas()
        self._check_complete()
        return MergePlan(
            values=values,
            untied=any(untied),
            vocab_size=self._new_vocab_size(values),
            replaced=tuple(sorted(name for name, value in values.items() if value.source is not self.base.get(name))),
            warnings=tuple(self.warnings),
        )

    @cached_property
    def names(self) -> NameMap:
        """The adapter's names in the base's files."""
        weights = [f"{module}.weight" for module in self.adapter.pairs]
        return fit_names([*weights, *self.adapter.whole], self.base)

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding by the base's configuration."""
        text = self.config.get("text_config")
        value = self.config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
        return value if isinstance(value, int) else None

    def _output_name(self, name: str) -> str:
        return self.names.stored(name) or name

    def _weight(self, pair: Pair) -> str:
        return self._output_name(f"{pair.module}.weight")

    def _stored(self, name: str, info: TensorInfo) -> None:
        if name not in self.base:
            unused = [w for w in self.adapter.whole.values() if self._output_name(w.name) not in self.base]
            pairs = [pair for pair in self.adapter.pairs.values() if self._weight(pair) not in self.base]
            raise ModelMergeError(
                f"the adapter has {len(unused) + 2 * len(pairs)} tensors that no base weight takes, "
                f"first {info.name!r} {info.shape} (looked for {name!r})",
                reason="ADAPTER_TENSOR_UNUSED",
                remedy="it was trained on another base model: check base_model.name",
                about={"tensor": info.name},
            )

    # Tied weights

    def _touched_groups(self) -> list[list[str]]:
        """Groups of output names that share a storage, of which the adapter touches at least one."""
        touched = {self._weight(pair) for pair in self.adapter.pairs.values()}
        touched |= {self._output_name(name) for name in self.adapter.whole}
        if not any(self._may_be_tied(name) for name in touched):
            return []
        groups = [
            [self._output_name(name) for name in group] for group in self.facts("which weights are tied").groups()
        ]
        groups = [group for group in groups if touched & set(group) and any(name in self.base for name in group)]
        if groups and self.adapter.config.ensure_weight_tying:
            raise ModelMergeError(
                f"the adapter's ensure_weight_tying is true and it changes tied weights ({', '.join(groups[0])})",
                reason="ADAPTER_UNSUPPORTED",
                remedy="merge it with peft (merge_and_unload) and export the result as a base model",
                about={"key": "ensure_weight_tying"},
            )
        return groups

    def _may_be_tied(self, name: str) -> bool:
        info = self.base.get(name)
        if info is None or self.vocab_size is None:
            return True
        embedding = any(pair.embedding for pair in self.adapter.pairs.values() if self._weight(pair) == name)
        return embedding or self.vocab_size in info.shape

    def _plan_group(self, values: dict[str, Value], group: list[str]) -> bool:
        """Decide one group of tied weights; True when its members came to differ and each is written by itself."""
        stored = next(name for name in group if name in self.base)
        members = {name: Value(self.base.get(name, self.base[stored])) for name in group}
        whole = {
            name: tensor for tensor in self.adapter.whole.values() if (name := self._output_name(tensor.name)) in group
        }
        for name, tensor in whole.items():
            info = self._checked_replacement(name, tensor, members[name].source.shape)
            alone = tensor.own or sum(not other.own for other in whole.values()) > 1
            for member in [name] if alone else group:
                members[member] = Value(info)
        for pair in self.adapter.pairs.values():
            if (name := self._weight(pair)) in group:
                source = members[name].source
                members[name] = Value(source, self._update(pair, name, source.shape))
        if self._all_same(list(members.values())):
            values[stored] = members[stored]
            return False
        values.update(members)
        self.warnings.append(
            f"{', '.join(group)} share one weight in the base model, and the adapter changes them differently: they are "
            "written separately, with tie_word_embeddings: false"
        )
        return True

    def _all_same(self, values: list[Value]) -> bool:
        if any(value.update is not None for value in values):
            return False
        first = values[0].source
        return all(value.source is first or self.same(first, value.source) for value in values[1:])

    # Shapes

    def _checked_replacement(self, name: str, whole: WholeTensor, shape: tuple[int, ...]) -> TensorInfo:
        """The tensor that replaces a base weight: of its shape, or with another number of vocabulary rows."""
        for copy in whole.copies:
            if not self.same(whole.info, copy):
                raise ModelMergeError(
                    f"adapter tensors {whole.info.name!r} and {copy.name!r} both replace {name!r} but differ",
                    reason="ADAPTER_CONFIG_INVALID",
                    remedy="save the adapter again",
                    about={"tensor": copy.name},
                )
        resized = len(shape) > 0 and shape[0] == self.vocab_size and whole.info.shape[1:] == shape[1:]
        if whole.info.shape != shape and not (resized and len(whole.info.shape) == len(shape)):
            raise _mismatch(f"replaces {name!r}", whole.info, whole.info.shape, shape)
        return whole.info

    def _update(self, pair: Pair, name: str, shape: tuple[int, ...]) -> Update:
        direct = Update(pair.module, Factor(pair.b, False), Factor(pair.a, False), pair.rank, pair.scaling)
        turned = replace(direct, left=Factor(pair.a, True), right=Factor(pair.b, True))
        if pair.embedding or self._is_transposed(name, direct, shape):
            update = turned
        else:
            update = direct
        if update.shape != shape:
            what = f"together with {pair.b.name!r} {pair.b.shape} updates {name!r} by a matrix of shape {update.shape} that"
            raise _mismatch(what, pair.a, pair.a.shape, shape)
        return update

    def _is_transposed(self, name: str, direct: Update, shape: tuple[int, ...]) -> bool:
        """Whether a linear weight is stored as (in, out). Shapes alone cannot tell for square ones, nor peft's flag."""
        suspicious = direct.shape != shape and direct.shape[::-1] == shape
        if not suspicious and not (self.adapter.config.fan_in_fan_out and direct.shape == direct.shape[::-1]):
            return False
        facts = self.facts("which weights are stored transposed (fan_in_fan_out)")
        return self.names.modelled(name) in facts.transposed

    def _new_vocab_size(self, values: Mapping[str, Value]) -> int | None:
        sizes = {
            value.source.shape[0]
            for name, value in values.items()
            if name in self.base and value.source.shape != self.base[name].shape
        }
        if len(sizes) > 1:
            raise ModelMergeError(
                f"the adapter resizes the vocabulary to different sizes: {sorted(sizes)}",
                reason="ADAPTER_BASE_MISMATCH",
                remedy="save the adapter again with all embeddings (save_embedding_layers=True)",
                about={"sizes": sorted(sizes)},
            )
        return sizes.pop() if sizes else None

    def _warn_of_ambiguous_alphas(self) -> None:
        """Peft sorts the patterns when it saves them, so where two match, the one used in training is not known."""
        for module in self.adapter.pairs:
            alphas = self.adapter.config.matching_alphas(module)
            if len(alphas) > 1:
                self.warnings.append(
                    f"several entries of alpha_pattern match {module!r} ({', '.join(map(str, alphas))}); the first one "
                    f"saved is used, as peft does on loading, which may not be the one it was trained with"
                )
                return

    # Completeness

    def _check_complete(self) -> None:
        """Every module the configuration targets has its pair, and every module to save its tensors."""
        taken = {self._weight(pair) for pair in self.adapter.pairs.values()}
        taken |= {self._output_name(name) for name in self.adapter.whole}
        for name, info in self.base.items():
            model_name = self.names.modelled(name)
            module = model_name.removesuffix(".weight")
            if name in taken or not name.endswith(".weight"):
                continue
            saved = any(f".{entry}." in f".{module}." for entry in self.adapter.config.modules_to_save)
            targeted = saved or (len(info.shape) == 2 and self.adapter.config.targets(module))
            # Files may hold layers that the model class leaves out (multi-token prediction, fused experts).
            if targeted and model_name in self.facts("which modules the adapter should cover").shapes:
                raise ModelMergeError(
                    f"adapter_config.json names module {module!r}, but the checkpoint holds no tensor for it",
                    reason="CHECKPOINT_INCOMPLETE",
                    remedy="copy the checkpoint again: its weights are not all there",
                    about={"tensor": name},
                )


def _mismatch(what: str, info: TensorInfo, shape: tuple[int, ...], base: tuple[int, ...]) -> ModelMergeError:
    return ModelMergeError(
        f"adapter tensor {info.name!r} {shape} {what} does not fit the base's shape {base}",
        reason="ADAPTER_BASE_MISMATCH",
        remedy="the adapter was trained on another base model: check base_model.name",
        about={"tensor": info.name, "shape": shape, "base_shape": base},
    )

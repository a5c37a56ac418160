"""Plan the merge before a byte is read: the source of every output tensor, and the update added to it.

Every base tensor becomes one output tensor, every adapter tensor is used once, and every shape is compared (``adapter/checks.py``), so the
plan is known to fit before writing begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from slipway.errors import ModelMergeError
from slipway.model.adapters.adapter_config import PEFT_REMEDY
from slipway.model.adapters.saved import Pair, unwrap_name
from slipway.model.configuration import ModelConfig
from slipway.model.model_files import ADAPTER_PREFIX
from slipway.model.safetensors_file import TensorInfo
from slipway.texts import counted
from slipway_merge.adapter.adapter import Adapter, WholeTensor
from slipway_merge.adapter.checks import (
    check_complete,
    check_replacement,
    check_rows,
    fit_update,
    has_transposed,
    new_vocab_size,
    no_place_error,
)
from slipway_merge.adapter.naming import Naming, use_current_names
from slipway_merge.plan.embeddings import Ties, check_no_bias, replace_rows, write_untied
from slipway_merge.plan.replication import replicate, source_layers
from slipway_merge.tensors.outputs import Alteration, MergePlan, Value
from slipway_merge.tensors.tensor_io import TensorReader

if TYPE_CHECKING:
    from slipway.model.model_facts import ModelFacts
    from slipway.model.pytorch.conversions import Conversions
    from slipway_merge.plan.peft_forms import PeftForms


@dataclass
class Planner:
    """Builds a :class:`MergePlan`.

    Args:
        base: Tensors of the base model by stored name.
        config: Its ``config.json``.
        adapter: The parsed adapter.
        facts: Asks transformers about the model, only when needed. Its argument, the purpose, is part of an error.
        reader: Compares stored tensors.
    """

    base: Mapping[str, TensorInfo]
    config: ModelConfig
    adapter: Adapter
    facts: Callable[[str], ModelFacts]
    reader: TensorReader
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layers = source_layers(self.adapter.config.replication)
        if self.layers:
            self.base = replicate(self.base, self.layers)

    def plan(self) -> MergePlan:
        """Return the plan of the merge.

        Raises:
            ModelMergeError: ``ADAPTER_TENSOR_UNUSED``, ``ADAPTER_BASE_MISMATCH``, ``ADAPTER_UNSUPPORTED`` or
                ``CHECKPOINT_INCOMPLETE``.
        """
        values = {name: Value(info) for name, info in self.base.items()}
        grouped = {member for group in self.groups for member in group}
        for whole in self.adapter.whole.values():
            if (name := self.naming.output(whole.name)) not in grouped:
                self._check_stored(name, whole.info)
                value = Value(self._check_replacement(name, whole, self.base[name].shape))
                copies = [name] if whole.own or not self.layers else self._copies(name)
                values.update(dict.fromkeys(copies, value))
        self._check_once()
        changes = self._changes()
        for name, change in changes.items():
            if name not in grouped:
                values[name] = change(values[name].source)
        untied = [group for group in self.groups if self._plan_group(values, group, changes)]
        if untied:
            write_untied(values, self.facts("which weights are tied").groups(), self.naming)
        self._warn_of_ambiguous_alphas()
        check_complete(self.base, self.adapter, self.naming.names, self._is_in_model)
        base_ids = {id(info) for info in self.base.values()}
        return MergePlan(
            values=values,
            untied=bool(untied),
            vocab_size=new_vocab_size(values, self.base),
            replaced=tuple(sorted(name for name, value in values.items() if id(value.source) not in base_ids)),
            warnings=tuple(self.warnings),
            layers=self.layers,
        )

    @cached_property
    def naming(self) -> Naming:
        """Translation of weight names between adapter, base files and model."""
        modules = [*self.adapter.pairs, *self.adapter.rows]
        wanted = [f"{module}.weight" for module in modules] + list(self.adapter.whole)
        return Naming(self.base, [*wanted, *self._form_weights], lambda: self._conversions)

    @property
    def _form_weights(self) -> tuple[str, ...]:
        forms = self.forms
        return (
            tuple(f"{module}.{path}" for module in forms.layers for path in forms.parameters(module)) if forms else ()
        )

    @cached_property
    def _conversions(self) -> Conversions:
        from slipway.model.pytorch.conversions import conversions

        return conversions(self.facts("which stored tensors its modules are made of").model, self.base)

    def names_in_peft(self) -> dict[str, str]:
        """Return, for every tensor of the adapter's file, the name that peft expects for the model as transformers loads it."""
        names = {info.name: key for key, info in self.adapter.forms.items()}
        names |= {
            info.name: unwrap_name(info.name) for pair in self.adapter.experts.values() for info in (pair.a, pair.b)
        }
        for module, info in self.adapter.tensors_by_module():
            name = self.naming.module_in_model(module)
            own = unwrap_name(info.name)
            names[info.name] = ADAPTER_PREFIX + own[own.index(module) :].replace(module, name, 1)
        return names

    @cached_property
    def forms(self) -> PeftForms | None:
        """The modules left to peft."""
        if not self.adapter.forms and not self.adapter.config.has_form:
            return None
        from slipway_merge.plan.peft_forms import PeftForms

        model = self.facts("which layers the adapter is for").model
        self.adapter = use_current_names(self.adapter, model, self._conversions.current)
        only = None if self.adapter.config.through_peft else self.adapter.formed_modules()
        return PeftForms(self.adapter.config.raw, self.adapter.forms, model, only=only)

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding by the base's configuration."""
        return self.config.vocabulary

    @cached_property
    def groups(self) -> list[list[str]]:
        """Weights that share a storage and that the adapter changes, by output name."""
        return self.ties.groups(self.vocab_size, self.facts)

    def base_tensor(self, name: str) -> TensorInfo | None:
        """Return the base's tensor for an output tensor, possibly under a tied name."""
        members = [name, *next((group for group in self.groups if name in group), ())]
        return next((self.base[member] for member in members if member in self.base), None)

    @cached_property
    def ties(self) -> Ties:
        """The weights that share a storage."""
        return Ties(self.base, self.adapter, self._form_weights, self.naming, self.reader)

    def _copies(self, name: str) -> list[str]:
        """Return all copies of a weight in repeated layers: they are one weight in training, so a trained bias applies to all."""
        return [other for other, info in self.base.items() if info is self.base[name]]

    def _weight(self, pair: Pair) -> str:
        return self.naming.output(f"{pair.module}.weight")

    def _check_stored(self, name: str, info: TensorInfo) -> None:
        if name not in self.base:
            unused = [w for w in self.adapter.whole.values() if self.naming.output(w.name) not in self.base]
            pairs = [pair for pair in self.adapter.pairs.values() if self._weight(pair) not in self.base]
            raise no_place_error(
                f"the adapter has {counted(len(unused) + 2 * len(pairs), 'tensor')} that no base weight takes, "
                f"first {info.name!r} {info.shape} (looked for {name!r})",
                info,
                settings=self.adapter.config.raw,
                base=self.base,
            )

    # Changes

    def _check_once(self) -> None:
        """Check that no base tensor is replaced by two adapter tensors (their names can differ by a prefix)."""
        taken: dict[str, WholeTensor] = {}
        for whole in self.adapter.whole.values():
            first = taken.setdefault(self.naming.output(whole.name), whole)
            if first is not whole:
                raise ModelMergeError(
                    f"adapter tensors {first.info.name!r} and {whole.info.name!r} stand for the same base weight",
                    reason="ADAPTER_TENSOR_UNUSED",
                    remedy="save the adapter again",
                    about={"tensor": whole.info.name},
                )

    def _changes(self) -> dict[str, Alteration]:
        """Return the changes of the weights that the adapter does not replace, by output name; refuse two changes of one weight."""
        alterations: list[tuple[str, Alteration]] = []
        for pair in self.adapter.pairs.values():
            name = self._weight(pair)
            self._find_source(name, pair.a)
            alterations.append((name, partial(self._apply_pair, pair, name)))
        for module, info in self.adapter.rows.items():
            name = self.naming.output(f"{module}.weight")
            self._find_source(name, info)
            self._check_no_bias(name)
            alterations.append(
                (name, partial(replace_rows, module, info, check_rows(self.adapter.config, module, info)))
            )
        if self.adapter.experts or self.adapter.config.parameters:
            alterations += self._expert_changes()
        if self.forms is not None:
            alterations += self._form_changes(self.forms)
        changes = dict(alterations)
        if len(changes) < len(alterations):
            twice = next(name for name, count in Counter(name for name, _ in alterations).items() if count > 1)
            raise ModelMergeError(
                f"the adapter changes {twice!r} in two ways at once",
                reason="ADAPTER_UNSUPPORTED",
                remedy=PEFT_REMEDY,
                about={"tensor": twice},
            )
        return changes

    def _check_no_bias(self, name: str) -> None:
        """Check that no head tied to this embedding has a bias, since the head gets the same rows."""
        for member in next((group for group in self.groups if group[0] == name), [name]):
            bias = self.naming.model_name(f"{member.removesuffix('weight')}bias")
            tied = next((names for names in self.facts("which layers have a bias").groups() if bias in names), [bias])
            stored = next(
                (self.base[other] for other in map(self.naming.output_from_model, tied) if other in self.base), None
            )
            check_no_bias(self.adapter.config, member, stored, self.reader)

    def _form_changes(self, forms: PeftForms) -> list[tuple[str, Alteration]]:
        from slipway_merge.plan.peft_forms import initial_precision_warning, restore_initial_weights

        for module in forms.layers:
            sources = {}
            for path in forms.parameters(module):
                name = self.naming.output(f"{module}.{path}")
                first = next(iter(forms.own_tensors(module).values()), next(iter(forms.tensors.values())))
                sources[path] = self._find_source(name, first)
            forms.sources[module] = sources
        forms.check()
        restore_initial_weights(
            forms, self.base, self.naming, tied={member for group in self.groups for member in group}
        )
        if warning := initial_precision_warning(forms):
            self.warnings.append(warning)
        return [
            (self.naming.output(f"{module}.{path}"), partial(_computed_value, forms, module, path))
            for module in forms.layers
            for path in sorted(forms.changed_parameters(module))
        ]

    def _expert_changes(self) -> list[tuple[str, Alteration]]:
        from slipway_merge.plan.experts import one_expert, places, stacked_pairs, whole_stack

        model = self.facts("which parameters the adapter is for").model
        alterations: list[tuple[str, Alteration]] = []
        for parameter, pair in stacked_pairs(self.adapter.experts, self.adapter.config, model).items():
            stack = self._conversions.stacks.get(parameter)
            if stack is None:
                name = self._conversions.renamed.get(parameter) or self.naming.output(parameter)
                self._check_stored(name, pair.a)
                alterations.append((name, partial(whole_stack, pair)))
            else:
                parts = places(stack, self.base)
                alterations += [(name, partial(one_expert, pair, expert, rows)) for name, expert, rows in parts]
        return alterations

    def _apply_pair(self, pair: Pair, name: str, source: TensorInfo) -> Value:
        maybe = self.adapter.config.fan_in_fan_out or self._has_transposed
        transposed = partial(self._is_transposed, name)
        update = fit_update(pair, name, source.shape, may_be_transposed=maybe, is_transposed=transposed)
        return Value(source, update=update)

    def _find_source(self, name: str, info: TensorInfo) -> TensorInfo:
        """Return a weight's tensor before its change: the adapter's own or the base's, possibly under a tied name."""
        own = [whole for whole in self.adapter.whole.values() if self.naming.output(whole.name) == name]
        if own:
            return own[0].info
        stored = self.base_tensor(name)
        if stored is None:
            self._check_stored(name, info)
        return stored or self.base[name]

    def _plan_group(self, values: dict[str, Value], group: list[str], changes: Mapping[str, Alteration]) -> bool:
        """Plan one group of tied weights; return True if its members differ now and are written separately."""
        settled = self.ties.settle(group, changes, self._check_replacement)
        values.update(settled.values)
        if settled.untied:
            self.warnings.append(
                f"{', '.join(group)} share one weight in the base model, and the adapter changes them differently: they "
                "are written separately, with tie_word_embeddings: false"
            )
        return settled.untied

    def _check_replacement(self, name: str, whole: WholeTensor, shape: tuple[int, ...]) -> TensorInfo:
        return check_replacement(name, whole, shape, vocab_size=self.vocab_size, same=self.reader.same)

    @cached_property
    def _has_transposed(self) -> bool:
        return has_transposed(self.base)

    def _is_transposed(self, name: str) -> bool:
        facts = self.facts("which weights are stored transposed (fan_in_fan_out)")
        return self.naming.model_name(name) in facts.transposed

    def _is_in_model(self, stored: str) -> bool:
        """Return whether the model has a stored tensor: its class may omit layers of the files (multi-token prediction, fused experts)."""
        return self.naming.model_name(stored) in self.facts("which modules the adapter should cover").shapes

    def _warn_of_ambiguous_alphas(self) -> None:
        """Warn if several alpha patterns match a module: peft sorts them when saving, so the one used in training is unknown."""
        for module in self.adapter.pairs:
            alphas = self.adapter.config.matching_alphas(module)
            if len(alphas) > 1:
                self.warnings.append(
                    f"several entries of alpha_pattern match {module!r} ({', '.join(map(str, alphas))}); the first one "
                    f"saved is used, as peft does on loading, which may not be the one it was trained with"
                )
                return


def _computed_value(forms: PeftForms, module: str, path: str, source: TensorInfo) -> Value:
    return Value(source, computed=forms.computation(module, path))

"""Find an adapter's modules in its base, whatever prefixes it was saved under, and refuse those that no server wraps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from slipway.errors import AdapterExportError
from slipway.model.adapters.saved import Pair, Saved
from slipway.model.families import DECODER
from slipway.model.folder import ModelFolder
from slipway.model.model_facts import CannotBuildError, ModelFacts, model_facts, remedy_of
from slipway.model.safetensors_file import TensorInfo
from slipway.model.trained import trained_model
from slipway.texts import quoted
from slipway_adapter.factors import find_differing
from slipway_adapter.params import Target
from slipway_adapter.rules import LLAMA, refusal_error

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fitted:
    """An adapter's pairs, with the base's names of their modules.

    Attributes:
        pairs: Pairs by module.
        targets: Names for ``target_modules``: ends of names if all modules with such an end are adapted and none of them holds others, otherwise whole names.
        cautions: Warnings about this adapter on this base.
    """

    pairs: Mapping[str, Pair]
    targets: tuple[str, ...]
    cautions: tuple[str, ...]


def fit(saved: Saved, base: Path, target: Target) -> Fitted:
    """Find the base's module for every pair of an adapter.

    Args:
        saved: The adapter.
        base: Folder of the base.
        target: What the adapter is written for.

    Raises:
        AdapterExportError: ``ADAPTER_NOT_SERVABLE`` for a module that the target does not take, a trained class of its own or a changed
            vocabulary; ``ADAPTER_TENSOR_UNUSED``, ``ADAPTER_BASE_MISMATCH``; ``BASE_MODEL_INVALID`` if transformers cannot build the base.
    """
    model = ModelFolder.open(base)
    own = trained_model(model, saved.folder)
    if own is not None:
        raise refusal_error("class", f"it was trained on {own}: servers load the base as what it is", base=own.base)
    facts = _facts(model)
    shapes = {name.removesuffix(".weight"): shape for name, shape in facts.shapes.items() if name.endswith(".weight")}
    modules = Modules(shapes)
    pairs = {pair.module: pair for pair in saved.pairs()}
    matches = modules.find_all(pairs)
    for name, module in matches.items():
        _check_module(pairs[name], module, shapes[module], facts, target)
    _check_saved_along(saved, model, modules)
    fitted = {module: pairs[name] for name, module in matches.items()}
    family = model.family
    what = "of a kind that is not known here" if family is None else f"of the kind {family.name}"
    cautions = (
        ()
        if family is DECODER or target in LLAMA
        else (f"the base is {what}: vLLM and SGLang serve adapters of text decoders; peft takes it",)
    )
    owners = {name.rpartition(".")[0] for name in facts.shapes}
    return Fitted(fitted, _targets(fitted, owners), cautions)


def _facts(base: ModelFolder) -> ModelFacts:
    try:
        return model_facts(base)
    except CannotBuildError as error:
        raise AdapterExportError(
            f"transformers cannot build the base model, whose modules the adapter changes: {error}",
            reason="BASE_MODEL_INVALID",
            remedy=remedy_of(base.config),
            about={"folder": base.path},
        ) from error


def _check_module(pair: Pair, module: str, shape: tuple[int, ...], facts: ModelFacts, target: Target) -> None:
    transposed = f"{module}.weight" in facts.transposed
    if transposed and target not in LLAMA:  # a GGUF file stores all weights the same way
        raise refusal_error(
            "conv1d",
            f"{quoted(module)} is a Conv1D, which stores its weight transposed, and servers wrap linear layers",
            module=module,
        )
    weight = f"{module}.weight"
    if weight in facts.tied or weight in facts.tied.values():
        raise refusal_error(
            "tied",
            f"the weight of {quoted(module)} is tied to another, and servers hold the two as one",
            module=module,
        )
    left, right = (pair.b.shape[0], pair.a.shape[1])
    wanted = (right, left) if pair.embedding or transposed else (left, right)
    if wanted != shape:
        raise AdapterExportError(
            f"the adapter's pair for {quoted(module)} updates a weight of shape {wanted}, and the base's has {shape}",
            reason="ADAPTER_BASE_MISMATCH",
            remedy="use the base model that the adapter was trained on",
            about={"module": module},
        )


def _check_saved_along(saved: Saved, base: ModelFolder, modules: Modules) -> None:
    """Check that the weights that peft saved beside a targeted embedding equal the base's."""
    if not saved.others:
        return
    stored = {name.removesuffix(".weight"): info for name, info in base.tensors.items()}
    there = Modules({name: info.shape for name, info in stored.items()})
    compared: dict[str, tuple[TensorInfo, TensorInfo | None]] = {}
    for name, info in saved.others.items():
        plain = name.replace(".base_layer", "").removesuffix(".weight")
        known = there.find(plain) or there.find(modules.find(plain) or plain)
        compared[name] = (info, stored[known] if known else None)
    for name in find_differing(compared):
        raise refusal_error(
            "vocabulary",
            f"it brings another {quoted(name)} than the base has, which servers leave out without a word (vllm/lora/utils.py, "
            "is_base_embedding_weights)",
            tensor=name,
        )


def _targets(adapted: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return the shortest names by which peft finds exactly these modules: it looks at modules that hold others too."""
    chosen = set(adapted)
    ends = {module.rpartition(".")[2] for module in chosen}
    named = {path for module in known for path in accumulate(module.split("."), "{}.{}".format)}
    if {module for module in named if module.rpartition(".")[2] in ends} == chosen:
        return tuple(sorted(ends))
    return tuple(sorted(chosen))


class Modules:
    """Finds modules by the ends of their names.

    Args:
        shapes: Shape of each module's weight, by the module's name in the model.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self._by_end: dict[str, list[str]] = defaultdict(list)
        for name in sorted(shapes):
            self._by_end[_end(name)].append(name)

    def find(self, name: str) -> str | None:
        """Return the module with this name, or the only one that shares the longest end with it; None if there is none."""
        if name in self._shapes:
            return name
        parts = name.split(".")
        alike = sorted(
            ((_likeness(parts, other.split(".")), other) for other in self._by_end[_end(name)]), reverse=True
        )
        best = [other for score, other in alike if score == alike[0][0]]
        return best[0] if len(best) == 1 else None

    def find_all(self, names: Iterable[str]) -> dict[str, str]:
        """Return the base's module for each of an adapter's modules.

        Raises:
            AdapterExportError: ``ADAPTER_TENSOR_UNUSED`` if there is none, or two names lead to one.
        """
        matches: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in names:
            module = self.find(name)
            if module is None or module in taken:
                what = (
                    f"belongs to the same module as {quoted(taken[module])}"
                    if module
                    else "belongs to no module of the base"
                )
                raise AdapterExportError(
                    f"the adapter's module {quoted(name)} {what}",
                    reason="ADAPTER_TENSOR_UNUSED",
                    remedy="use the base model that the adapter was trained on",
                    about={"module": name},
                )
            matches[name] = module
            taken[module] = name
        return matches


def _end(name: str) -> str:
    """Return the part of a name from the first layer number on, or its last part if it has no number."""
    parts = name.split(".")
    return ".".join(parts[next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1) :])


def _likeness(parts: list[str], others: list[str]) -> tuple[int, int]:
    """Return the number of equal parts at the end, and the number of all common parts."""
    equal = 0
    for part, other in zip(reversed(parts), reversed(others), strict=False):
        if part != other:
            break
        equal += 1
    return equal, len(set(parts) & set(others))

"""Run the reference with transformers and peft in float32: base + adapter, unmerged, or a plain model.

Compiled or wrapped models, other tools and other versions of transformers save adapters under other prefixes, and peft would
ignore such tensors without an error. Here their names are matched by their ends. The merge's matching is not reused: the
reference must be independent of the outputs compared with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import peft
import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import ModulesToSaveWrapper, load_peft_weights

from slipway.errors import CheckpointValidationError, ModelExportError
from slipway.model.adapters.saved import is_plain_lora
from slipway.model.families import Family
from slipway.model.folder import ModelFolder
from slipway.model.model_files import ADAPTER_WEIGHTS
from slipway.model.module_patterns import check_patterns, names_in
from slipway.model.pytorch.head_updates import without_head
from slipway.model.pytorch.joined_updates import JoinedUpdates
from slipway.model.pytorch.placing import find_unplaced, make_placeable
from slipway.model.runs.checkpoints import read_adapter_config
from slipway.model.safetensors_file import read_safetensors
from slipway.model.sentences import Pooling
from slipway.model.trained import TrainedModel, trained_model
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import UnplacedTensors, Unusable
from slipway.proof.transformers_runtime import TransformersModel, from_pretrained, known_pooling
from slipway.texts import counted

#: Parts that peft inserts between the name of a layer and that of its weight.
_WRAPPER = re.compile(r"\.(modules_to_save|original_module|token_adapter|base_layer)(?:\.default)?(?=\.)")

Shapes = Mapping[str, tuple[int, ...]]


class ReferenceModel(TransformersModel):
    """Base + adapter; the adapter can be switched off."""

    def __init__(
        self, module: Any, family: Family, *, stored: str, pooling: Pooling | None = None, by_layers: bool = False
    ) -> None:
        super().__init__(module, family, stored=stored, pooling=pooling, by_layers=by_layers)
        config = module.peft_config["default"]
        kind = getattr(config.peft_type, "value", config.peft_type)
        rank, alpha = getattr(config, "r", "?"), getattr(config, "lora_alpha", "?")
        self.adapter = f"{kind} r={rank} alpha={alpha}, peft {peft.__version__}"

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Switch the adapter off within the context."""
        with self.within(self._module.disable_adapter):
            yield


def load(base: Path, adapter: Path | None = None, *, threads: int, by_layers: bool = False) -> TransformersModel:
    """Load base + adapter, or the base alone if there is no adapter; ``by_layers`` computes them layer by layer.

    The base keeps its stored type, and its weights are mapped, if it then computes the same values in the comparison (:func:`_keeps_values`);
    otherwise all of it is float32.

    Raises:
        NotRunnable: They are to be computed layer by layer, and the layers are not known.
        Unusable: Base or adapter cannot be loaded, or they do not fit together.
    """
    torch.set_num_threads(threads)
    if adapter is None or is_plain_lora(adapter):
        model = _load(base, adapter, dtype="auto", by_layers=by_layers)
        if _keeps_values(model.module):
            return model
        del model
    return _load(base, adapter, dtype=torch.float32, by_layers=by_layers)


def _load(base: Path, adapter: Path | None, *, dtype: Any, by_layers: bool) -> TransformersModel:
    pooling = known_pooling(adapter, base)
    if adapter is None:
        module, family = from_pretrained(base, dtype=dtype, by_layers=by_layers)
        return TransformersModel(module, family, stored=stored_dtype(base), pooling=pooling, by_layers=by_layers)
    opened, trained = _open_trained(base, adapter)
    module, family = from_pretrained(base, dtype=dtype, trained=trained, by_layers=by_layers)
    module, _ = add_adapter(module, opened, adapter)
    if trained:
        _use_trained_head_alone(module)
    _name_replicated_layers(module)
    return ReferenceModel(module, family, stored=stored_dtype(base), pooling=pooling, by_layers=by_layers)


def _keeps_values(module: Any) -> bool:
    """Return whether the model computes in float32 the same as if it had been loaded in float32: only its stored weights are short.

    The adapter's factors must be float32, and no value that the code computes, such as the scale of some embeddings, may have been rounded.
    """
    added = (tensor for name, tensor in module.named_parameters() if ".lora_" in name)
    buffers = (tensor for tensor in module.buffers() if tensor.is_floating_point())
    return all(tensor.dtype == torch.float32 for tensor in (*added, *buffers))


def _open_trained(base: Path, adapter: Path) -> tuple[ModelFolder, TrainedModel | None]:
    try:
        opened = ModelFolder.open(base)
        return opened, trained_model(opened, adapter)
    except ModelExportError as error:
        raise Unusable(str(error)) from error


def _use_trained_head_alone(module: Any) -> None:
    """Give the model without its adapter the trained head: the head with which the training began was random, and is lost.

    Both sides then have the same head, so that results measure what the adapter changes in the body.
    """
    for part in module.modules():
        if isinstance(part, ModulesToSaveWrapper):
            part.original_module.load_state_dict(part.modules_to_save["default"].state_dict())


def add_adapter(module: Any, base: ModelFolder, adapter: Path) -> tuple[Any, JoinedUpdates | None]:
    """Add the adapter by peft, unmerged; return the model, and the updates that peft cannot place, which are added beside it.

    Raises:
        Unusable: The adapter, or one of its tensors, has no place in this model.
    """
    try:
        check_patterns(read_adapter_config(adapter), names_in(module))
        read_safetensors(adapter / ADAPTER_WEIGHTS)  # peft would take a pickle too
        with without_head(module, base, adapter) as own:
            _resize_vocabulary(module, load_peft_weights(str(own), device="cpu"))
            with make_placeable(module, base, own) as (folder, joined):
                config = peft.PeftConfig.from_pretrained(str(folder))
                _let_tied_layers_load_their_own(config, module, load_peft_weights(str(folder), device="cpu"))
                tuned = peft.PeftModel.from_pretrained(module, str(folder), config=config, is_trainable=False)
                load_ignored_tensors(tuned, folder)
                if is_plain_lora(folder):
                    _check_all_placed(tuned, folder, adapter)
                if joined:
                    joined.attach(module, tuned)
    except (CheckpointValidationError, OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
        raise Unusable(f"peft cannot load the adapter {adapter.name!r} on the base model: {error}") from error
    return tuned, joined


def _check_all_placed(tuned: Any, folder: Path, adapter: Path) -> None:
    left = find_unplaced(tuned, folder)
    if left:
        raise UnplacedTensors(
            f"{counted(len(left), 'factor')} of the adapter {adapter.name!r}, first {min(left)!r}, reach no layer of the model"
        )


def _resize_vocabulary(module: Any, saved: Mapping[str, torch.Tensor]) -> None:
    """Resize the embeddings to the adapter's saved rows: the vocabulary may have been resized before training."""
    layers = (module.get_input_embeddings(), module.get_output_embeddings())
    names = {name.rpartition(".")[2] for name, layer in module.named_modules() if layer in layers}
    plain = ((_WRAPPER.sub("", key).split("."), tensor) for key, tensor in saved.items())
    sizes = {len(tensor) for parts, tensor in plain if parts[-1] == "weight" and parts[-2] in names}
    if len(sizes) == 1 and sizes != {layers[0].num_embeddings}:
        torch.manual_seed(0)  # makes rows that the adapter lacks equal in every run
        module.resize_token_embeddings(sizes.pop(), mean_resizing=False)


def _let_tied_layers_load_their_own(config: Any, module: Any, saved: Mapping[str, torch.Tensor]) -> None:
    """Let each tied layer load its own saved factors; in float32, peft would load those of one layer for all."""
    if not getattr(config, "ensure_weight_tying", False) or not any(".lora_embedding_" in key for key in saved):
        return
    owners = {key.partition(".lora_")[0] for key in saved if ".lora_" in key}
    names = sorted((name for name, _ in module.named_modules() if name), key=len, reverse=True)
    places = {owner: next((name for name in names if f".{owner}".endswith(f".{name}")), None) for owner in owners}
    if None not in places.values():
        config.ensure_weight_tying = False
        config.target_modules = set(places.values())


def _name_replicated_layers(module: peft.PeftModel) -> None:
    """Extend ``layer_types`` for a model that peft made deeper (``layer_replication``).

    peft changes only the number of layers; a model's cache and attention masks depend on ``layer_types``.
    """
    ranges = getattr(module.peft_config["default"], "layer_replication", None)
    config = module.get_base_model().config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if ranges and kinds:
        config.layer_types = [kinds[number] for first, end in ranges for number in range(first, end)]


def load_ignored_tensors(module: Any, adapter: Path) -> None:
    """Load the adapter's tensors that peft ignored into their places.

    Args:
        module: The model with the adapter, from ``PeftModel.from_pretrained``.
        adapter: The adapter's folder.

    Raises:
        UnplacedTensors: Their places cannot be determined.
    """
    saved = load_peft_weights(str(adapter), device="cpu")
    if not set_peft_model_state_dict(module, dict(saved)).unexpected_keys:
        return
    wanted = get_peft_model_state_dict(module, save_embedding_layers=False)
    # An adapter may or may not have the tensors of embeddings.
    whole = get_peft_model_state_dict(module, save_embedding_layers=True)
    places = {name: tuple(tensor.shape) for name, tensor in sorted({**whole, **wanted}.items()) if name not in saved}
    left_out = {name: tuple(saved[name].shape) for name in sorted(set(saved) - set(wanted) - set(whole))}
    empty = sorted(set(wanted) - set(saved))
    matches = match_names(left_out, places)
    if not set(empty) <= set(matches.values()):
        raise UnplacedTensors(
            f"peft ignores {counted(len(left_out), 'tensor')} of the adapter {adapter.name!r}, first {min(left_out)!r}: "
            f"their places cannot be determined by their names; peft expects {min(set(empty) - set(matches.values()))!r}"
        )
    set_peft_model_state_dict(module, {matches.get(name, name): tensor for name, tensor in saved.items()})


def match_names(left_out: Shapes, empty: Shapes) -> dict[str, str]:
    """Match each name to the one of equal shape with the longest common end, if there is exactly one.

    The longest common ends are matched first, so that their names are no longer candidates for the others.
    """
    by_end: dict[str, list[str]] = {}
    for name in empty:
        by_end.setdefault(_end(name), []).append(name)
    pairs = [
        (_count_equal_ends(name, other), name, other)
        for name in left_out
        for other in by_end.get(_end(name), ())
        if left_out[name] == empty[other]
    ]
    matches: dict[str, str] = {}
    for size in sorted({pair[0] for pair in pairs}, reverse=True):
        taken = set(matches.values())
        free = [(name, other) for at, name, other in pairs if at == size and name not in matches and other not in taken]
        names, others = Counter(name for name, _ in free), Counter(other for _, other in free)
        matches |= {name: other for name, other in free if names[name] == others[other] == 1}
    return matches


def _end(name: str) -> str:
    """Return the end of a name from its first layer number; without one, from the module."""
    parts = name.split(".")
    module = len(parts) - (3 if parts[-2].startswith("lora_") else 2)
    return ".".join(parts[next((index for index, part in enumerate(parts) if part.isdigit()), module) :])


def _count_equal_ends(name: str, other: str) -> int:
    """Return the number of equal parts at the end of two names."""
    parts = zip(name.split(".")[::-1], other.split(".")[::-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], parts))

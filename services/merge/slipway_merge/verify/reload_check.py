"""Load the written folder as users do: transformers must find every weight, and the logits must be those of base plus adapter.

Both are computed in float32, so they may differ only by the rounding of the written weights. To measure its effect on the logits, the
merged weights are moved at random by as much as rounding does. One model is in memory at a time. Larger checkpoints get only the spot
check and the validation of an export.
"""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from slipway.errors import ModelMergeError
from slipway.model.adapters.saved import is_plain_lora, unwrap_name
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, ENCODER_DECODER, Family, has_own_layout
from slipway.model.folder import ModelFolder
from slipway.model.model_facts import check_loadable, configuration_of, named_class
from slipway.model.model_files import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from slipway.model.module_patterns import check_patterns, names_in
from slipway.model.pytorch.placing import find_unplaced, make_placeable, rename_patterns
from slipway.model.pytorch.sample_inputs import compared_outputs, sample_inputs
from slipway.model.runs.checkpoints import read_adapter_config
from slipway.model.safetensors_file import read_safetensors
from slipway.model.trained import TrainedModel
from slipway.stage import Context
from slipway_merge.tensors.tensor_io import UNIT_ROUNDOFF

#: Largest effect of rounding on the logits, in multiples of random rounding's effect (at most 2.8 with all known forms).
_NOISE_FACTOR = 6.0
#: Error of a model's float32 computation relative to its logits (at most 8e-7 with all known forms).
_COMPUTING = 1e-5


def reload_check(
    made: ModelFolder,
    base: ModelFolder,
    adapter: Path,
    *,
    names: Callable[[], Mapping[str, str]],
    dtype: str,
    rounded: Collection[str] | None,
    trained: TrainedModel | None = None,
    ctx: Context,
) -> dict[str, Any]:
    """Load the merged model and compare its logits with those of base and adapter; return figures for the report.

    Args:
        made: The merged model.
        base: The base model.
        adapter: The adapter.
        names: Returns for each of its tensors the name that peft expects for this model.
        dtype: Safetensors name of the written type.
        rounded: Modules or parameters whose weights were rounded to it; None for all.
        trained: The class the adapter was trained on, if the base is stored as another one.
        ctx: Gets a warning if peft cannot compute logits to compare with.

    Raises:
        ModelMergeError: ``MERGE_NOT_VERIFIED``.
    """
    config, family = made.config, made.family
    cls = _model_class(config)
    if cls is None:
        return {"loaded": "not checked: transformers has no class of this model's name"}
    if has_own_layout(config):
        return {
            "loaded": "not checked: its files have its publisher's layout, which transformers' class of this name does not read"
        }
    merged, info = _load(cls, made, output_loading_info=True)
    if family is not None:
        info["missing_keys"] = [key for key in info["missing_keys"] if not key.startswith(family.unused)]
    info["unexpected_keys"] = set(info["unexpected_keys"]) - _names_at_loading(merged, base.tensors)
    wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    for kind, keys in wrong.items():
        if keys:
            raise _not_verified_error(f"transformers finds {kind.replace('_', ' ')}: {keys[0]}", keys[0])
    family = family or _guess_family(merged)
    if family is None:
        return {"loaded": True, "logits": f"not compared: what a {config.description} takes and gives is not known"}
    try:
        inputs = sample_inputs(merged, family)
        ours = compared_outputs(merged, family, inputs)
    except Exception as error:  # noqa: BLE001 - the model's own code may raise anything, for example if it needs more
        not_compared = (
            f"not compared: the {config.description} does not run on random input of its kind ({_first_line(error)})"
        )
        ctx.warn(f"the merged model was loaded, but its logits were {not_compared}")
        return {"loaded": True, "logits": not_compared}
    _round_at_random(merged, UNIT_ROUNDOFF[dtype], rounded)
    noise = _norm(compared_outputs(merged, family, inputs) - ours)
    size = int(merged.get_input_embeddings().num_embeddings)
    del merged
    gc.collect()

    def run(model: Any) -> torch.Tensor:
        return compared_outputs(model, family, inputs)

    with _rename_for_peft(adapter, names(), ctx) as renamed:
        model = _load(cls, base, config=trained.config if trained else None)
        return {"loaded": True, **_compare(model, base, renamed, ours, run=run, noise=noise, size=size, ctx=ctx)}


def _names_at_loading(model: Any, stored: Collection[str]) -> set[str]:
    """Return the base's names and what transformers makes of them, because it reports both: those without a use had none before, either."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()
    return {*stored, *(rename_source_key(name, renamings, converters, prefix, state)[0] for name in stored)}


@contextmanager
def _rename_for_peft(adapter: Path, names: Mapping[str, str], ctx: Context) -> Iterator[Path]:
    """Yield the adapter with its tensors under the names that peft expects, because peft silently ignores others."""
    if all(old == new for old, new in names.items()):
        yield adapter
        return
    with TemporaryDirectory(dir=ctx.workdir) as place:
        modules = {_module(old): _module(new) for old, new in names.items()}
        settings = rename_patterns(read_adapter_config(adapter), modules)
        (Path(place) / ADAPTER_CONFIG).write_text(json.dumps(settings), encoding="utf-8")
        tensors = {names[key]: tensor for key, tensor in load_file(adapter / ADAPTER_WEIGHTS).items() if key in names}
        save_file(tensors, Path(place) / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        yield Path(place)


def _module(key: str) -> str:
    """Return the module of an adapter's tensor."""
    return unwrap_name(key).removeprefix(ADAPTER_PREFIX).partition(".lora_")[0]


def _round_at_random(model: Any, unit_roundoff: float, names: Collection[str] | None) -> None:
    """Move the weights of these modules or parameters (None: all) at random by as much as rounding does."""
    generator = torch.Generator().manual_seed(1)
    parameters = dict(model.named_parameters())
    chosen = [name for name in parameters if names is None or any(f"{name}.".startswith(f"{part}.") for part in names)]
    with torch.no_grad():
        for name in chosen or parameters:  # an adapter may have been trained under other names
            weight = parameters[name]
            weight.add_(weight * (2 * torch.rand(weight.shape, generator=generator) - 1), alpha=unit_roundoff)


def _compare(
    model: Any,
    base: ModelFolder,
    adapter: Path,
    ours: torch.Tensor,
    *,
    run: Callable[[Any], torch.Tensor],
    noise: float,
    size: int,
    ctx: Context,
) -> dict[str, Any]:
    if model.get_input_embeddings().num_embeddings != size:
        model.resize_token_embeddings(size, mean_resizing=False)
    before = run(model)
    check_patterns(read_adapter_config(adapter), names_in(model))
    try:
        with _silence_libraries(), make_placeable(model, base, adapter) as (folder, joined):
            config = PeftConfig.from_pretrained(str(folder))
            _load_tied_factors_separately(config, folder)
            module = PeftModel.from_pretrained(model, str(folder), config=config)
            if is_plain_lora(folder) and (left := find_unplaced(module, folder)):
                raise ValueError(f"it drops {len(left)} of its factors, first {min(left)!r}")  # noqa: TRY301 - as what peft raises
            if joined:
                joined.attach(model, module)
            # Run the model itself, because peft's wrapper names other inputs (input_ids for Whisper).
            tuned = run(module.get_base_model())
    except Exception as error:  # noqa: BLE001 - whatever peft's own checks and constructors raise
        not_compared = f"not compared: peft cannot load the adapter ({error})"
        ctx.warn(f"the merged model was loaded, but its logits were {not_compared}")
        return {"logits": not_compared}
    difference, change = _norm(ours - tuned), _norm(tuned - before)
    tolerance = _NOISE_FACTOR * noise + _COMPUTING * _norm(tuned) + 1e-6
    if not difference <= tolerance:
        raise _not_verified_error(
            f"its logits differ from those of base and adapter by {difference:.3g} (norm), which rounding does not explain "
            f"({tolerance:.3g}); the adapter changes them by {change:.3g}",
            "",
        )
    return {"logits_difference": difference, "logits_change": change, "logits_tolerance": tolerance}


def _load_tied_factors_separately(config: Any, adapter: Path) -> None:
    """Let tied layers load the factors saved for each; in float32, peft would load one layer's factors for all."""
    tensors = read_safetensors(adapter / ADAPTER_WEIGHTS).tensors
    if getattr(config, "ensure_weight_tying", False) and any(".lora_embedding_" in key for key in tensors):
        config.ensure_weight_tying = False
        config.target_modules = {
            key.removeprefix(ADAPTER_PREFIX).partition(".lora_")[0] for key in tensors if ".lora_" in key
        }


def _model_class(config: ModelConfig) -> Any:
    names = config.get("architectures")
    return named_class(str(names[0])) if isinstance(names, list) and names else None


def _norm(values: torch.Tensor) -> float:
    """Return the 75 % quantile over positions of the root mean square.

    The other positions may differ by more than rounding: a token between two experts goes to either.
    """
    by_position = values.square().mean(dim=1).sqrt()
    return float(by_position.quantile(0.75))


def _guess_family(model: Any) -> Family | None:
    """Return a family to run an unknown model as, if it takes tokens. Both compared models have one class, so the guess does no harm."""
    if model.main_input_name != "input_ids":
        return None
    try:
        int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):  # it has no single one (CLIP)
        return None
    return ENCODER_DECODER if model.config.is_encoder_decoder else DECODER


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _load(cls: Any, folder: ModelFolder, *, config: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Load a model; with ``output_loading_info`` return the loading information too.

    With ``config`` use that configuration instead of the folder's, and new weights where the folder has none that fit.

    Raises:
        ModelMergeError: ``MERGE_NOT_VERIFIED`` if transformers refuses it.
    """
    try:
        with _silence_libraries():
            check_loadable(folder, cls, config=config)
            if config is not None:
                options |= {"config": configuration_of(config), "ignore_mismatched_sizes": True}
            return cls.from_pretrained(folder.path, dtype=torch.float32, trust_remote_code=False, **options)
    except Exception as error:  # the model's own code may raise anything
        raise _not_verified_error(f"transformers cannot load it: {error}", "") from error


@contextmanager
def _silence_libraries() -> Iterator[None]:
    """Silence progress bars and warnings of libraries within the block."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.utils.logging.set_verbosity(before)


def _not_verified_error(what: str, tensor: str) -> ModelMergeError:
    return ModelMergeError(
        f"the merged model does not behave like base and adapter: {what}",
        reason="MERGE_NOT_VERIFIED",
        remedy="run slipway stage merge with verify=spot to get the files nevertheless, and report this message",
        about={"tensor": tensor},
    )

"""Check that every targeted module has its tensors and every module to save exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slipway.errors import ModelMergeError
from slipway.model.adapters.adapter_config import AdapterConfig
from slipway.model.adapters.refusals import incomplete
from slipway.model.module_patterns import check_patterns
from slipway.model.safetensors_file import TensorInfo
from slipway_merge.adapter.adapter import Adapter
from slipway_merge.adapter.names import NameMap


def check_complete(
    base: Mapping[str, TensorInfo], adapter: Adapter, names: NameMap, is_in_model: Callable[[str], bool]
) -> None:
    """Check that the checkpoint has all that ``adapter_config.json`` names.

    :meth:`PeftForms.check` checks the modules that peft merges.

    Raises:
        ModelMergeError: ``CHECKPOINT_INCOMPLETE``.
    """
    config = adapter.config
    _check_tokens(adapter)
    modules = [*adapter.pairs, *adapter.rows, *adapter.formed_modules()]
    taken = {names.stored(name) for name in [*(f"{module}.weight" for module in modules), *adapter.whole]}
    modelled = {name: names.modelled(name).rpartition(".") for name in base}
    check_patterns(config.raw, (module for module, _, _ in modelled.values()))
    for name, info in base.items():
        module, _, parameter = modelled[name]
        if name in taken or not names.is_trained(name):
            continue
        bias = parameter == "bias" and config.bias == "all"
        saved = any(f".{entry}." in f".{module}." for entry in config.modules_to_save)
        matrix = parameter == "weight" and len(info.shape) > 1 and (bool(adapter.rows) or not config.through_peft)
        targeted = bias or (saved and parameter == "weight") or (matrix and config.targets(module))
        if targeted and is_in_model(info.name):
            what = (
                f"adapter_config.json names module {module!r}, but the checkpoint holds no tensor for its {parameter}"
            )
            raise incomplete(what, tensor=name)


def _check_tokens(adapter: Adapter) -> None:
    """Check that the named modules have rows; those of tied modules may be saved once."""
    tokens = adapter.config.tokens
    named = dict(tokens) if isinstance(tokens, Mapping) else {"its input embedding": tokens} if tokens else {}
    if len(adapter.rows) >= len(named) or (adapter.rows and len(set(named.values())) == 1):
        return
    found = [name for name in named if any(f".{module}".endswith(f".{name}") for module in adapter.rows)]
    what = f"adapter_config.json names token ids for {', '.join(named)}, but the checkpoint has rows for "
    raise incomplete(what + (", ".join(found) or "none"), key="trainable_token_indices")


def check_rows(config: AdapterConfig, module: str, info: TensorInfo) -> tuple[int, ...]:
    """Return the numbers of the rows that a module's row tensor replaces.

    Raises:
        ModelMergeError: ``ADAPTER_CONFIG_INVALID`` if the configuration names another number of rows, or none.
    """
    if isinstance(config.tokens, Mapping):
        found = [rows for name, rows in config.tokens.items() if f".{module}".endswith(f".{name}")]
        rows = found[0] if found else ()
    else:
        rows = config.tokens
    if len(info.shape) != 2 or len(rows) != info.shape[0]:
        raise ModelMergeError(
            f"adapter tensor {info.name!r} {info.shape} brings rows of an embedding, but adapter_config.json names "
            f"{len(rows)} token ids for it",
            reason="ADAPTER_CONFIG_INVALID",
            remedy="use the adapter_config.json that was saved with these weights",
            about={"tensor": info.name},
        )
    return rows

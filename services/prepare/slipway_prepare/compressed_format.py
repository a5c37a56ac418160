"""Weights as compressed-tensors stores them; the library itself decompresses them, one module at a time.

Source: compressed-tensors 0.20, ``compressors/pack_quantized`` and ``compressors/naive_quantized`` (names and shapes of the parts),
``quantization/quant_config.py`` and ``utils/match.py`` (the scheme of a module).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipway.model.module_patterns import GROUP_TARGETS, IGNORED, check_patterns
from slipway_prepare.faults import invalid_error, unsupported_error
from slipway_prepare.recipes import Base, Dequantized, Read, Recipe, check_shape

if TYPE_CHECKING:
    from slipway_prepare.source import Stored

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_EXPRESSION = "re:"
"""Begins the names of modules that are expressions."""
_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale")
#: Parts that belong to activations and to the KV cache: they matter only when computing with integers.
_ACTIVATION = (
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
    "k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point",
)  # fmt: skip


def read_compressed(base: Base) -> Dequantized:
    """Return every weight that compressed-tensors stores quantized.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``, ``BASE_QUANTIZATION_UNSUPPORTED``.
    """
    settings = dict(base.quantization)
    sparsity, transforms = (_part(settings, key) for key in ("sparsity_config", "transform_config"))
    if sparsity.get("format", "dense") != "dense":
        raise unsupported_error(f"is stored sparse ({sparsity.get('format')})", sparsity=sparsity.get("format"))
    if transforms.get("config_groups"):
        raise unsupported_error("has rotated weights (transform_config)", key="transform_config")
    schemes = _schemes(settings)
    modules = base.modules("weight_scale")
    _check_expressions(schemes, settings, modules)
    made, used = [], set()
    loaded = _loaded_names(schemes, modules)
    for module in modules:
        scheme = _scheme(loaded.get(module, module), schemes, settings)
        name = scheme.format or settings.get("format")
        name = getattr(name, "value", name)
        if name not in FORMATS:
            raise unsupported_error(f"stores {module} as {name}; {', '.join(FORMATS)} are read", format=name)
        used.add(name)
        made.append(_recipe(base, module, scheme, name))
    dropped = tuple(sorted(name for name in base.source.tensors if name.rpartition(".")[2] in _ACTIVATION))
    return Dequantized(
        f"compressed-tensors {'+'.join(sorted(used)) or 'without quantized weights'}",
        tuple(made),
        dropped=dropped,
        details={"groups": {key: _describe(scheme) for key, scheme in sorted(schemes.items())}},
        suffixes=_PARTS,
    )


def _part(settings: dict[str, Any], key: str) -> dict[str, Any]:
    part = settings.get(key) or {}
    if not isinstance(part, dict):
        raise invalid_error(f"has an unreadable {key} in its quantization_config: {part!r}", key=key)
    return part


def _schemes(settings: dict[str, Any]) -> dict[str, Any]:
    import pydantic
    from compressed_tensors.quantization import QuantizationConfig

    known = {key: value for key, value in settings.items() if key in QuantizationConfig.model_fields}
    try:
        return dict(QuantizationConfig.model_validate(known).config_groups)
    except (pydantic.ValidationError, ValueError, KeyError, TypeError) as error:
        raise invalid_error(
            f"has an unreadable quantization_config: {str(error)[:300]}", key="quantization_config"
        ) from error


def _check_expressions(schemes: dict[str, Any], settings: dict[str, Any], modules: list[str]) -> None:
    """Refuse patterns (such as ``re:.*lm_head``) that the library, which uses :mod:`re`, might match for too long."""
    targets = [target for scheme in schemes.values() for target in scheme.targets]
    texts = {GROUP_TARGETS: targets, IGNORED: settings.get("ignore") or ()}
    expressions = {
        key: [text.removeprefix(_EXPRESSION) for text in names if text.startswith(_EXPRESSION)]
        for key, names in texts.items()
    }
    check_patterns(
        expressions,
        modules,
        refusal=lambda what, key: invalid_error(
            f"has patterns that cannot be used: {what}", key=key or "quantization_config"
        ),
    )


def _loaded_names(schemes: dict[str, Any], modules: list[str]) -> dict[str, str]:
    """Return the names that schemes give to single modules which are stored under others, by these.

    transformers changes the beginnings of some models' names while it loads them, and schemes have the names of the loaded model. Of
    modules with the same end, from the word before the first number on, there must be one.
    """
    by_end: dict[str, list[str]] = {}
    for module in modules:
        by_end.setdefault(_end(module), []).append(module)
    stored = set(modules)
    targets = {target for scheme in schemes.values() for target in scheme.targets} - stored
    found = {}
    for target in targets:
        alike = by_end.get(_end(target), [])
        if len(alike) == 1 and alike[0] not in targets:
            found[alike[0]] = target
    return found


def _end(module: str) -> str:
    parts = module.split(".")
    first = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[max(first - 1, 0) :] if first < len(parts) else parts[-1:])


def _scheme(module: str, schemes: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Return the scheme of a quantized module; schemes that name it take precedence over those for all linear layers."""
    from compressed_tensors.utils.match import is_match

    linear = torch.nn.Linear(1, 1, bias=False, device="meta")
    ranked = sorted(schemes.values(), key=lambda scheme: "Linear" in scheme.targets)
    matches = [s for s in ranked if is_match(module, linear, s.targets, settings.get("ignore") or ())]
    if not matches or matches[0].weights is None:
        raise invalid_error(f"has a quantized {module}, for which its quantization_config has no group", module=module)
    return matches[0]


def _recipe(base: Base, module: str, scheme: Any, name: str) -> Recipe:
    packed, bits, kind = name == "pack-quantized", scheme.weights.num_bits, str(scheme.weights.type)
    if not 1 <= bits <= 8 or (kind == "float" and bits != 8):
        raise unsupported_error(f"stores {module} in a {kind} of {bits} bits", module=module)
    weight = base.part(module, "weight_packed" if packed else "weight")
    scale = base.part(module, "weight_scale")
    shape = _packed_shape(base, module, weight, scheme) if packed else weight.shape
    if len(shape) != 2 or min(shape) < 1:
        raise invalid_error(f"has {weight.name!r} of shape {shape}, expected a matrix", tensor=weight.name)
    if not packed:
        check_shape(weight, shape, dtypes=(scheme.weights.pytorch_dtype(),))
    check_shape(scale, *_scale_shapes(shape, scheme, weight.name))
    names = [weight.name, scale.name]
    for part in ("weight_zero_point", "weight_shape"):
        stored = base.optional(module, part)
        if stored is not None:
            names.append(stored.name)
    zero = base.optional(module, "weight_zero_point")
    if not scheme.weights.symmetric:
        _check_zero(base, module, scale, shape, scheme, packed=packed)
    elif zero is not None:
        check_shape(zero, scale.shape)
    if base.optional(module, "weight_g_idx") is not None:  # the library no longer applies it
        raise unsupported_error(f"orders the columns of {module} by activation (weight_g_idx)", module=module)
    dtype = base.half(scale.dtype)
    prefix = len(module) + 1

    def build(read: Read) -> Tensor:
        from compressed_tensors.compressors import BaseCompressor

        parts = {part[prefix:]: read(part) for part in names}
        # Compute in float32, to round only once; the formats themselves compute in the type of the scale.
        parts["weight_scale"] = parts["weight_scale"].float()
        dense = BaseCompressor.get_value_from_registry(name).decompress(parts, scheme)["weight"]
        return dense.to(dtype)

    return Recipe(f"{module}.weight", dtype, shape, tuple(names), build)


def _packed_shape(base: Base, module: str, weight: Stored, scheme: Any) -> tuple[int, ...]:
    stored = base.part(module, "weight_shape")
    check_shape(stored, (2,), dtypes=(torch.int64, torch.int32))
    rows, columns = (int(size) for size in base.source.read(stored.name))
    check_shape(weight, (rows, -(-columns * scheme.weights.num_bits // 32)), dtypes=(torch.int32,))
    return rows, columns


def _scale_shapes(shape: tuple[int, ...], scheme: Any, name: str) -> list[tuple[int, ...]]:
    rows, columns = shape
    match _strategy(scheme):
        case "tensor":
            return [(), (1,), (1, 1)]
        case "channel":
            return [(rows, 1)]
        case "group":
            return [(rows, -(-columns // scheme.weights.group_size))]
        case "block":
            height, width = scheme.weights.block_structure
            return [(-(-rows // height), -(-columns // width))]
        case other:
            raise unsupported_error(f"has {name!r} quantized by {other}", strategy=other)


def _check_zero(base: Base, module: str, scale: Stored, shape: tuple[int, ...], scheme: Any, *, packed: bool) -> None:
    zero = base.part(module, "weight_zero_point")
    if packed and _strategy(scheme) in ("group", "channel"):
        check_shape(zero, (-(-shape[0] * scheme.weights.num_bits // 32), scale.shape[-1]), dtypes=(torch.int32,))
    else:
        check_shape(zero, scale.shape)


def _strategy(scheme: Any) -> str:
    """Return which elements share a scale: the library gives its enum or the enum's value."""
    return str(getattr(scheme.weights.strategy, "value", scheme.weights.strategy))


def _describe(scheme: Any) -> dict[str, Any]:
    weights = scheme.weights.model_dump(mode="json") if scheme.weights is not None else {}
    kept = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder")
    return {key: weights.get(key) for key in kept if weights.get(key) is not None}

"""Write an adapter as GGUF: plan its factors, write, check and describe the file, and add its text files.

Factors have their rows in the base's order. llama.cpp adds ``alpha / r · B @ (A @ x)`` to a product with a weight, where ``r`` is the
number of columns of B, and the file has one ``alpha`` for all weights (``llama-adapter.cpp``, ``llama_adapter_lora_weight::get_scale``).
For an embedding it looks up rows of A instead (``llm_graph_context::build_inp_embd``).

llama.cpp reads text with the vocabulary of the base's file, and takes a chat template as a setting (``--chat-template-file``). So the
tokenizer, the chat template and a ``Modelfile`` lie beside the file. By the description a reader finds whether the file is whole.

Axes: r = rank of a pair, d_in and d_out = columns and rows of the weight in the file.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from slipway.distribution import installed_version, own_version
from slipway.errors import AdapterExportError
from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.files.paths import real_file
from slipway.model.adapters.saved import Pair, Saved, read_saved
from slipway.model.configuration import ModelConfig
from slipway.model.model_files import CHAT_TEMPLATES, tokenizer_files
from slipway.stage import Context
from slipway.texts import quoted
from slipway_gguf import modelfile
from slipway_gguf.architectures import adapter_refusal
from slipway_gguf.architectures.entry import WHOLE, Piece, keep, transpose
from slipway_gguf.diagnosis import check_file
from slipway_gguf.metadata import Parameters
from slipway_gguf.params import AdapterParams
from slipway_gguf.vocabulary.documents import DEFAULT, TOKENIZER, TokenizerFiles, read_files, templates_of
from slipway_gguf.weights.completeness import EMBEDDING, HEAD
from slipway_gguf.weights.header import adapter_fields
from slipway_gguf.weights.naming import text_name
from slipway_gguf.weights.planned import Part, Planned
from slipway_gguf.weights.tensors import names_of, plan_file
from slipway_gguf.weights.writing import write_file

_LIBRARIES = ("gguf", "numpy", "xllamacpp")

DESCRIPTION = "gguf_adapter.json"
PATTERN = "*-LoRA.gguf"
"""Name of the adapter's file; a user may put a file of the base beside it."""
HALVES = (".lora_a", ".lora_b")

_MATRIX = 2
_SAME_ALPHA = 2.0**-23
"""Relative distance of numbers that are equal in float32, the type of ``adapter.lora.alpha``."""
_REMEDY = "use the base model that the adapter was trained on"


def export_adapter(inputs: Mapping[str, Path], params: AdapterParams, ctx: Context) -> Path:
    """Write the adapter in ``inputs["adapter"]`` for files of the base in ``inputs["base"]``; return the folder.

    Raises:
        AdapterExportError, GGUFExportError, ModelMergeError, CheckpointValidationError: With the reasons that the README lists.
    """
    started = time.monotonic()
    saved, base = read_saved(inputs["adapter"]), plan_file(inputs["base"])
    _check_plain(saved)
    _check_predicts(inputs["base"])
    pairs = saved.pairs()
    factors = plan_factors(pairs, base.tensors, base.parameters)
    kinds = {each.name: factor_kind(each) for each in factors.tensors}
    architecture, lineage = base.parameters.architecture.name, ctx.input_digests.get("adapter", "")
    folder = ctx.workdir / "adapter"
    folder.mkdir()
    label = min({kind.name for kind in kinds.values()}, key=("F32", "F16").index)
    written = write_file(
        folder / f"{params.name}-{label}-LoRA.gguf",
        adapter_fields(architecture, params, alpha=factors.alpha, lineage=lineage),
        factors.tensors,
        kinds,
        importance={},
        threads=max(1, ctx.threads),
        on_bytes=lambda done, total: ctx.progress("factors", done=done, total=total),
    )
    ctx.digest(written.path, written.sha256)
    checks = check_file(written, factors.tensors)
    add_text_files(inputs["adapter"], inputs["base"], written.path, ctx)
    facts = {
        "file": written.path.name,
        "sha256": written.sha256,
        "architecture": architecture,
        "modules": len(pairs),
        "ranks": saved.ranks,
        "alpha": factors.alpha,
        "folded": factors.folded,
        "precision": {"F32": "float32", "F16": "float16"}[label],
        "lineage": lineage,
        "tools": {"slipway": own_version(), **{name: installed_version(name) for name in _LIBRARIES}},
        **checks,
    }
    described = {**facts, "weights": [each.name.removesuffix(HALVES[0]) for each in factors.tensors[::2]]}
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    ctx.record(**facts, size_after_bytes=written.size, seconds=round(time.monotonic() - started, 3))
    return folder


def _check_plain(saved: Saved) -> None:
    """Refuse an adapter that has more than pairs of factors; the stage ``adapter`` explains such refusals rule by rule."""
    config = saved.config
    more = {
        "peft_type": saved.raw.get("peft_type") != "LORA",
        "modules_to_save": bool(config.modules_to_save),
        "target_parameters": bool(config.parameters),
        "layer_replication": bool(config.replication),
        "trainable_token_indices": bool(config.tokens),
        "bias": config.bias != "none",
        "a variant of LoRA": config.through_peft,
        f"the tensor {min(saved.others, default='')!r}": bool(saved.others),
        "no pair of factors": not saved.halves,
    }
    extra = next((name for name, there in more.items() if there), "")
    if extra:
        raise AdapterExportError(
            f"the adapter is more or less than pairs of factors: {extra}",
            remedy="deliver the merged model instead; the stage adapter with target=gguf makes of an adapter what this stage reads",
            about={"rule": extra},
        )


def _check_predicts(base: Path) -> None:
    """Refuse a base that makes vectors or a score of a text."""
    reason = adapter_refusal(ModelConfig.read(base))
    if reason:
        raise AdapterExportError(
            reason,
            reason="FAMILY_UNSUPPORTED",
            remedy="deliver the merged model as GGUF instead",
            about={"rule": "family"},
        )


def missing_weights(folder: Path, file: Path) -> tuple[str, ...]:
    """Return the weights of the description for which the file lacks a factor or both; llama.cpp would not notice."""
    listed = read_json_object(folder / DESCRIPTION, largest=LARGEST_LIST).get("weights")
    stored = {each.name for each in gguf.GGUFReader(file).tensors}
    wanted = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return tuple(name for name in wanted if any(f"{name}{half}" not in stored for half in HALVES))


def add_text_files(adapter: Path, base: Path, file: Path, ctx: Context) -> None:
    """Add the adapter's tokenizer files (or else the base's), its chat template as a file, and the ``Modelfile``.

    Args:
        adapter: Folder of the adapter.
        base: Folder of the base.
        file: The adapter's file in the folder of the output.
        ctx: Gets a warning if the tokenizer has tokens that the base's lacks.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``.
    """
    source, folder = (adapter if (adapter / TOKENIZER).is_file() else base), file.parent
    for path in tokenizer_files(source):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(real_file(source, path.relative_to(source)), target)
    of_base = read_files(base)
    files = replace(read_files(folder), config=of_base.config, generation=of_base.generation)
    lacking = sorted(_numbers(files).items() - _numbers(of_base).items(), key=lambda pair: pair[1])
    if lacking:
        ctx.warn(
            f"the adapter's tokenizer has {len(lacking)} tokens that the base's lacks, first {quoted(lacking[0][0])}: llama.cpp reads text with "
            "the base's file, and would split them; the merged model has them"
        )
    template = templates_of(files).get(DEFAULT, "")
    if template:
        (folder / CHAT_TEMPLATES[0]).write_text(template, encoding="utf-8")
    modelfile.write_for_adapter(folder, file.name, files)


def _numbers(files: TokenizerFiles) -> Mapping[str, int]:
    return {**files.vocabulary, **{each.content: number for number, each in files.added.items()}}


@dataclass(frozen=True, slots=True)
class Factors:
    """The tensors of a file.

    Attributes:
        tensors: The tensors, A before B.
        alpha: Alpha of all pairs.
        folded: Number of pairs with another alpha, which is multiplied into their B.
    """

    tensors: list[Planned]
    alpha: float
    folded: int


def plan_factors(pairs: Sequence[Pair], base: Sequence[Planned], parameters: Parameters) -> Factors:
    """Plan the tensors of an adapter, in the order of the base's.

    Args:
        pairs: The adapter's pairs, with the base's names of their modules.
        base: Tensors of the base's file.
        parameters: The base's numbers.

    Raises:
        AdapterExportError: ``ADAPTER_TENSOR_UNUSED`` for a module without a weight in the file, or two for one;
            ``ADAPTER_BASE_MISMATCH`` for another shape; ``ADAPTER_NOT_SERVABLE`` if all scalings are zero.
    """
    alpha = common_alpha(pairs)
    places = _places(base, parameters)
    matches: dict[str, tuple[Pair, float]] = {}
    for pair in pairs:
        targets = places(pair.module)
        twice = any(each.name in matches for each in targets)
        if not targets or twice:
            what = "belongs to the same weight as another" if twice else "has no weight in the base's file"
            raise _pair_error(f"the adapter's module {quoted(pair.module)} {what}", pair, "ADAPTER_TENSOR_UNUSED")
        for each in targets:
            _check_shape(pair, each)
            matches[each.name] = (pair, _factor(pair, alpha))
    ordered = [(each, *matches[each.name]) for each in base if each.name in matches]
    tensors = [half for each, pair, factor in ordered for half in _halves(each, pair, factor)]
    return Factors(tensors, alpha, len({pair.module for _, pair, factor in ordered if factor != 1.0}))


def _places(base: Sequence[Planned], parameters: Parameters) -> Callable[[str], list[Planned]]:
    """Return a function from a module's name to the file's tensors that are made from its weight and take factors."""
    sources: dict[str, list[Planned]] = defaultdict(list)
    for each in base:
        tensors = {part.tensor.name for part in each.parts}
        forms = all(part.piece.form in (keep, transpose) for part in each.parts)
        if len(tensors) == 1 and forms and len(each.shape) == _MATRIX:
            sources[_own_name(min(tensors))].append(each)
    names, planned = names_of(parameters), {each.name: each for each in base}

    def targets(module: str) -> list[Planned]:
        name = f"{module}.weight"
        # A checkpoint may lack the beginning of names that modules have.
        other = planned.get(names.get_name(name, try_suffixes=(".weight",)) or "")
        made = sources.get(_own_name(name)) or ([other] if other else [])
        if any(each.name.endswith(parameters.architecture.unadapted or ("\0",)) for each in made):
            return []
        # A head that is made from a tied embedding has no pair of its own.
        return [each for each in made if each.name != HEAD or EMBEDDING not in {one.name for one in made}]

    return targets


def _own_name(name: str) -> str:
    """Return the name that a tensor has in a model of text alone: a part's tensors and its modules may have other beginnings."""
    return text_name(name) or name


def common_alpha(pairs: Iterable[Pair]) -> float:
    """Return the most common alpha of the pairs, rounded to float32, so that the fewest factors change.

    Raises:
        AdapterExportError: ``ADAPTER_NOT_SERVABLE``: all scalings are zero, for which llama.cpp would take 1, or beyond float32.
    """
    with np.errstate(over="ignore"):
        each = [float(np.float32(pair.scaling * pair.rank)) for pair in pairs]
    alphas = Counter(alpha for alpha in each if alpha and math.isfinite(alpha))
    if not alphas:
        raise AdapterExportError(
            "the adapter cannot be served beside its base: all its scalings are zero, or beyond float32",
            remedy="check lora_alpha in adapter_config.json; with zero the base model alone computes the same",
            about={"rule": "nothing"},
        )
    most = max(alphas.values())
    return max(alpha for alpha, count in alphas.items() if count == most)


def factor_kind(planned: Planned) -> gguf.GGMLQuantizationType:
    """Return the type of a factor: float16 if it is stored so and multiplied by nothing, otherwise float32, which rounds nothing."""
    exact = all(part.piece.factor == 1.0 and part.tensor.dtype == "F16" for part in planned.parts)
    return gguf.GGMLQuantizationType.F16 if exact else gguf.GGMLQuantizationType.F32


def _factor(pair: Pair, alpha: float) -> float:
    """Return the factor to multiply B by, so that ``alpha / r`` gives the pair's scaling."""
    factor = pair.scaling * pair.rank / alpha
    return 1.0 if abs(factor - 1.0) <= _SAME_ALPHA else factor


def _halves(weight: Planned, pair: Pair, factor: float) -> tuple[Planned, Planned]:
    """Return A (r, d_in) and B (d_out, r) for a weight; A (vocabulary, r) and B (features, r) for an embedding.

    The rows of B have the order of the weight's rows. A weight that the model stores as (in, out) has factors like any other.
    """
    across, columns = weight.name == EMBEDDING, weight.parts[0].piece.columns
    a_shape = pair.a.shape[::-1] if across else pair.a.shape
    a = Planned(
        f"{weight.name}.lora_a", a_shape, (Part(pair.a, Piece(form=transpose if across else keep, columns=columns)),)
    )
    rows = tuple(
        Part(pair.b, WHOLE if across else replace(part.piece, form=keep, columns=keep)) for part in weight.parts
    )
    parts = tuple(
        replace(each, piece=replace(each.piece, factor=factor * part.piece.factor))
        for each, part in zip(rows, weight.parts, strict=True)
    )
    shape = (sum(part.shape()[0] for part in parts), pair.rank)
    return a, Planned(f"{weight.name}.lora_b", shape, parts)


def _check_shape(pair: Pair, planned: Planned) -> None:
    left, right = pair.b.shape[0], pair.a.shape[1]
    updated = (right, left) if pair.embedding else (left, right)
    source = planned.parts[0]
    shape = source.tensor.shape[::-1] if source.piece.form is transpose else source.tensor.shape
    if updated != shape or pair.embedding is not (planned.name == EMBEDDING):
        kind = "an embedding" if pair.embedding else "a weight"
        raise _pair_error(
            f"the adapter's pair for {quoted(pair.module)} updates {kind} of shape {updated}, and the file's "
            f"{planned.name} has {shape}",
            pair,
            "ADAPTER_BASE_MISMATCH",
        )


def _pair_error(what: str, pair: Pair, reason: str) -> AdapterExportError:
    return AdapterExportError(what, reason=reason, remedy=_REMEDY, about={"module": pair.module[:200]})

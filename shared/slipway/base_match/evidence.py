"""Judge a base model by files, before anything runs: it is the adapter's, it is another one, or files cannot tell.

A checkpoint is compared by the shapes of plain LoRA factors, the library's class and the tokenizer. Only known forms are
judged; the merge checks every tensor exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.base_match.match import BaseMatch, BaseMatchStatus
from slipway.base_match.models import Comparison, Outcome, compare_models, vocabulary_size
from slipway.base_match.recorded import Recorded, last_part, read_known_json, recorded_base, repository_of
from slipway.errors import CheckpointValidationError
from slipway.files.json_documents import LARGEST_LIST
from slipway.model.configuration import ModelConfig
from slipway.model.dtypes import FLOATS
from slipway.model.families import TRAINED_FAMILIES
from slipway.model.model_files import ADAPTER_WEIGHTS, CONFIG, has_safetensors
from slipway.model.runs.checkpoints import read_adapter_config
from slipway.model.safetensors_file import TensorInfo, read_safetensors, read_weights

MISFIT, MISMATCH = "ADAPTER_BASE_MISMATCH", "BASE_MODEL_MISMATCH"
_REMEDY = (
    "set base_model.name (--base-model, EXPORT_BASE_MODEL) to the model the adapter was trained on; if you know that this base "
    "is the right one, set base_model.trust: true"
)
_WORST = (BaseMatchStatus.CONFIRMED, BaseMatchStatus.UNPROVEN, BaseMatchStatus.TRUSTED)

_PREFIX = "base_model.model."
_LIBRARY = re.compile(r"transformers\.models\.(\w+)\.modeling_\w+")
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_WHOLE = re.compile(r"(?P<module>.+?)(?:\.modules_to_save(?:\.default)?)?\.weight")
_LAYER = re.compile(r"(?P<prefix>(?:[^.\d][^.]*\.)+)(?P<number>\d{1,6})\.")
_NOT_PLAIN = ("layer_replication", "target_parameters", "use_qalora", "use_bdlora", "megatron_config")
"""LoRA options that give the factors other shapes than those of their layer."""
_OTHER_TOKENIZER = 0.5


@dataclass(frozen=True, slots=True)
class UsedBase:
    """The base model of an export.

    Attributes:
        folder: Its folder.
        label: Its name for people, never a path of this machine.
        contents: Whether its files can be read; for a bucket, the folder has only headers and configurations.
        repository: Hub repository that it was just read from; empty for any other base.
        revisions: Names of the revision that was read: the commit, and the requested one.
        look: Whether to search this machine for the model that the adapter names.
    """

    folder: Path
    label: str
    contents: bool
    repository: str = ""
    revisions: tuple[str, ...] = ()
    look: bool = True


def match_base(base: UsedBase, checkpoints: Sequence[Path], *, trust: bool) -> BaseMatch:
    """Compare the base in use with the one the adapters were trained on; for several adapters, return the least certain verdict.

    Args:
        base: The base in use.
        checkpoints: Folders with the adapters.
        trust: Accept a base that files contradict.

    Raises:
        CheckpointValidationError: ``ADAPTER_BASE_MISMATCH`` if an adapter's shapes do not fit; ``BASE_MODEL_MISMATCH`` if the
            base is another model than an adapter names.
    """
    verdicts = [_match(base, checkpoint, trust=trust) for checkpoint in checkpoints]
    return max(verdicts, key=lambda match: _WORST.index(match.status))


def _match(base: UsedBase, checkpoint: Path, *, trust: bool) -> BaseMatch:
    config = read_adapter_config(checkpoint)
    recorded = recorded_base(checkpoint, config, look=base.look)
    reason, what = MISFIT, misfit(checkpoint, config, base.folder)
    compared = None if what else _match_hub(base, recorded) or _compare_with_recorded(base, recorded)
    if compared is not None and compared.outcome is Outcome.SAME:
        return BaseMatch(status=BaseMatchStatus.CONFIRMED, reason=compared.what)
    if not what:
        reason = MISMATCH
        what = compared.what if compared is not None and compared.outcome is Outcome.OTHER else ""
        what = what or other_library(config, base.folder)
        what = what or (other_tokenizer(checkpoint, base.folder) if base.contents else "")
    if not what:
        return BaseMatch(status=BaseMatchStatus.UNPROVEN, reason=_explain_unproven(base, recorded, compared))
    if not trust:
        raise _refusal_error(base, checkpoint, recorded, reason=reason, what=what)
    return BaseMatch(
        status=BaseMatchStatus.TRUSTED, reason=f"files speak against the base, and base_model.trust takes it: {what}"
    )


def _compare_with_recorded(base: UsedBase, recorded: Recorded) -> Comparison | None:
    """Compare the base in use with the recorded one; return None if that is not on this machine, or is the same folder.

    The same folder proves nothing: it can hold another model by now. A snapshot of a repository cannot change.
    """
    if recorded.folder is None:
        return None
    repository = repository_of(recorded.folder)
    if _is_same_place(base.folder, recorded.folder):
        said = f"it is {repository} from the Hugging Face cache, which the adapter names"
        return Comparison(Outcome.SAME, said) if repository else None
    comparison = compare_models(base.folder, recorded.folder, contents=base.contents)
    if comparison.outcome is Outcome.SAME:
        return Comparison(Outcome.SAME, f"it is {recorded.label}, which the adapter names: {comparison.what}")
    if comparison.outcome is Outcome.OTHER and recorded.guessed:
        return Comparison(Outcome.UNKNOWN, "a folder of that name in the current folder holds another model")
    revisions = repository != "" and repository_of(base.folder) == repository
    if comparison.outcome is Outcome.OTHER and revisions and not recorded.revision:
        said = "they are two revisions of one repository, and the adapter does not say which it needs"
        return Comparison(Outcome.UNKNOWN, said)
    return comparison


def _match_hub(base: UsedBase, recorded: Recorded) -> Comparison | None:
    """Return SAME if the base was just read from the repository and revision that the adapter names."""
    if not base.repository or base.repository != recorded.name or (recorded.revision or "main") not in base.revisions:
        return None
    return Comparison(Outcome.SAME, f"it is {base.repository} from the hub, which the adapter names")


def _is_same_place(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _explain_unproven(base: UsedBase, recorded: Recorded, compared: Comparison | None) -> str:
    """Return why files cannot prove the base."""
    if not recorded.name:
        return "the adapter does not name its base model"
    if compared is not None:
        return f"the base could not be compared with {recorded.label}, which the adapter names: {compared.what}"
    if recorded.folder is not None:
        return f"the base is in the folder that the adapter names ({recorded.label}), and only that name speaks for it"
    absent = "which is not on this machine to compare with"
    if last_part(recorded.name) == last_part(base.label):
        return f"only its name speaks for the base: the adapter names {recorded.label}, {absent}"
    return f"the adapter names {recorded.label}, {absent}, and the base in use is {base.label!r}"


def _refusal_error(
    base: UsedBase, checkpoint: Path, recorded: Recorded, *, reason: str, what: str
) -> CheckpointValidationError:
    named = f"{recorded.name[:1000]!r}" if recorded.name else "no base model"
    where = f", found at {recorded.folder}" if recorded.folder is not None else ""
    return CheckpointValidationError(
        f"the base model {base.folder} is not the one the adapter was trained on: {what}; "
        f"adapter_config.json in {checkpoint} names {named}{where}",
        reason=reason,
        remedy=_REMEDY,
        about={"base_model": base.folder, "checkpoint": checkpoint, "recorded": recorded.name[:1000]},
    )


def misfit(checkpoint: Path, config: Mapping[str, Any], base: Path) -> str:
    """Return why the adapter's tensors cannot belong to a base, judged by headers alone; empty if nothing contradicts."""
    plain = config.get("peft_type") == "LORA" and not any(config.get(option) for option in _NOT_PLAIN)
    if not plain or not has_safetensors(base):
        return ""
    try:
        adapter, weights = read_safetensors(checkpoint / ADAPTER_WEIGHTS).tensors, read_weights(base)
    except (CheckpointValidationError, OSError):  # reported later, where the files are used
        return ""
    settings = read_known_json(base / CONFIG)
    own = ModelConfig(settings if isinstance(settings, dict) else {})
    vocabulary, heads = vocabulary_size(own), _new_heads(config, own)
    depths = _depths(weights)
    for name, tensor in adapter.items():
        factor, whole = _FACTOR.fullmatch(name), _WHOLE.fullmatch(name)
        parts = factor or whole
        if parts is None or not name.startswith(_PREFIX) or len(tensor.shape) != 2:
            continue
        module = parts["module"].removeprefix(_PREFIX)
        if whole and any(f".{head}." in f".{module}." for head in heads):
            continue
        bare = module.partition(".")[2]  # the base may have been saved without its head
        weight = weights.get(f"{module}.weight") or weights.get(f"{bare}.weight")
        if weight is None:
            fault = _too_deep(module, depths) or _too_deep(bare, depths) if factor else ""
        elif weight.dtype not in FLOATS or len(weight.shape) != 2:
            continue
        elif factor:
            fault = _other_factors(tensor, adapter, weight, vocabulary=vocabulary)
        else:
            fault = _other_rows(tensor, weight, vocabulary=vocabulary)
        if fault:
            return fault
    return ""


def _new_heads(config: Mapping[str, Any], settings: ModelConfig) -> tuple[str, ...]:
    """Return the modules that the training added as a new head, if the base has a head for another task, or none."""
    task, saved = config.get("task_type"), config.get("modules_to_save")
    family = TRAINED_FAMILIES.get(task) if isinstance(task, str) else None
    if family is None or settings.family is family or not isinstance(saved, list):
        return ()
    return tuple(name for name in saved if isinstance(name, str))


def _other_factors(a: TensorInfo, adapter: Mapping[str, TensorInfo], weight: TensorInfo, *, vocabulary: int) -> str:
    """Return why a pair does not fit a weight, stored transposed or not; else empty. a: (r, d_in), b: (d_out, r)."""
    b = adapter.get(a.name.replace(".lora_A.", ".lora_B."))
    if b is None or b is a or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        return ""
    product = (b.shape[0], a.shape[1])
    resized = vocabulary in (0, weight.shape[0]) and product[1] == weight.shape[1]
    if resized or product in (weight.shape, weight.shape[::-1]):
        return ""
    return (
        f"adapter tensor {a.name!r} {a.shape}, with its lora_B {b.shape}, does not fit {weight.name!r} {weight.shape}"
    )


def _other_rows(tensor: TensorInfo, weight: TensorInfo, *, vocabulary: int) -> str:
    """Return why a whole weight does not fit; else empty. Other rows are allowed for a resized vocabulary."""
    resized = vocabulary in (0, weight.shape[0]) and tensor.shape[1] == weight.shape[1]
    if tensor.shape == weight.shape or resized:
        return ""
    return f"adapter tensor {tensor.name!r} {tensor.shape} does not fit {weight.name!r} {weight.shape}"


def _depths(weights: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Return the largest layer number for each name prefix."""
    depths: dict[str, int] = {}
    for match in filter(None, map(_LAYER.match, weights)):
        depths[match["prefix"]] = max(depths.get(match["prefix"], 0), int(match["number"]))
    return depths


def _too_deep(module: str, depths: Mapping[str, int]) -> str:
    """Return the contradiction if a layer's number is beyond the base's last one under the same name; else empty."""
    match = _LAYER.match(module)
    last = depths.get(match["prefix"]) if match else None
    if match is None or last is None or int(match["number"]) <= last:
        return ""
    return f"the adapter has a layer {match['prefix']}{match['number']}, and the base ends at {match['prefix']}{last}"


def other_library(config: Mapping[str, Any], base: Path) -> str:
    """Return why the trained class (``auto_mapping``) is not the base's; empty if nothing contradicts."""
    mapping = config.get("auto_mapping")
    library = mapping.get("parent_library") if isinstance(mapping, dict) else None
    family = _LIBRARY.fullmatch(library) if isinstance(library, str) else None
    settings = read_known_json(base / CONFIG)
    if family is None or not isinstance(settings, dict):
        return ""
    kind, classes = settings.get("model_type"), settings.get("architectures")
    names = [kind, *(classes if isinstance(classes, list) else [])]
    trained = _letters(family[1])
    texts = [_letters(name) for name in names if isinstance(name, str) and name]
    if not texts or any(text.startswith(trained) or trained.startswith(text) for text in texts):
        return ""
    return f"the adapter was trained on a model of {library}, and the base's model_type is {kind!r}"


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def other_tokenizer(checkpoint: Path, base: Path) -> str:
    """Return why the tokenizer beside the adapter is not the base's; empty if it is, if it is absent, or if the adapter has embeddings.

    Added tokens do not count. Tokenizers differ if fewer than half of the tokens have the same numbers.
    """
    ours = read_known_json(checkpoint / "tokenizer.json", largest=LARGEST_LIST)
    if ours is None or _saves_embeddings(checkpoint):
        return ""
    trained = _vocabulary(ours)
    known = _vocabulary(read_known_json(base / "tokenizer.json", largest=LARGEST_LIST))
    if not trained or not known:
        return ""
    alike = sum(known.get(token) == number for token, number in trained.items()) / min(len(trained), len(known))
    if alike >= _OTHER_TOKENIZER:
        return ""
    return f"its tokenizer shares {alike:.0%} of its tokens with that of the base"


def _saves_embeddings(checkpoint: Path) -> bool:
    """Return whether the adapter has its own embedding rows, so that another tokenizer may be intended."""
    try:
        tensors = read_safetensors(checkpoint / ADAPTER_WEIGHTS).tensors
    except (CheckpointValidationError, OSError):
        return True
    return any("lora_" not in name and len(tensor.shape) == 2 for name, tensor in tensors.items())


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """Return token → number of a ``tokenizer.json``; empty for unknown kinds."""
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    entries = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(entries, dict):
        return {token: number for token, number in entries.items() if isinstance(number, int)}
    if isinstance(entries, list):  # Unigram: [token, score], in order
        return {
            entry[0]: n
            for n, entry in enumerate(entries)
            if isinstance(entry, list) and entry and isinstance(entry[0], str)
        }
    return {}

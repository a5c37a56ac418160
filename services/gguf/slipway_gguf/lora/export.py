"""Write an adapter as GGUF: plan, write, check, and describe the file; add its tokenizer, chat template and ``Modelfile`` beside it.

llama.cpp reads text with the vocabulary of the base's file, and takes a chat template as a setting (``--chat-template-file``).
By the description a reader finds whether the file is whole.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf

from slipway.distribution.installed import installed_version, own_version
from slipway.errors import AdapterExportError
from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.files.links import real_file
from slipway.model.adapters.saved import Saved, read_saved
from slipway.model.model_files import CHAT_TEMPLATES, tokenizer_files
from slipway.stage import Context
from slipway.texts import quoted
from slipway_gguf import modelfile
from slipway_gguf.general import adapter_fields
from slipway_gguf.lora.factors import kind_of, plan_factors
from slipway_gguf.params import AdapterParams
from slipway_gguf.vocabulary.documents import DEFAULT, TOKENIZER, TokenizerFiles, read_files, templates_of
from slipway_gguf.weights.checks import check_file
from slipway_gguf.weights.tensors import plan_file
from slipway_gguf.weights.writing import write_file

_LIBRARIES = ("gguf", "numpy", "xllamacpp")

DESCRIPTION = "gguf_adapter.json"
PATTERN = "*-LoRA.gguf"
"""Name of the adapter's file; a user may put a file of the base beside it."""
HALVES = (".lora_a", ".lora_b")


def export_adapter(inputs: Mapping[str, Path], params: AdapterParams, ctx: Context) -> Path:
    """Write the adapter in ``inputs["adapter"]`` for files of the base in ``inputs["base"]``; return the folder.

    Raises:
        AdapterExportError, GGUFExportError, ModelMergeError, CheckpointValidationError: With the reasons that the README lists.
    """
    started = time.monotonic()
    saved, base = read_saved(inputs["adapter"]), plan_file(inputs["base"])
    _check_plain(saved)
    pairs = saved.pairs()
    factors = plan_factors(pairs, base.tensors, base.parameters)
    kinds = {each.name: kind_of(each) for each in factors.tensors}
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

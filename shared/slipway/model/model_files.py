"""List the files of a model, a tokenizer or an adapter, and find a base model.

Only files on these lists leave a training run, so optimizer states, random-number states, trainer states and pickles are never
copied.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

from slipway.errors import CheckpointValidationError
from slipway.files.json_documents import read_object_or_empty
from slipway.files.paths import files_in, real_file, user_path
from slipway.files.regular_file import read_regular
from slipway.model.safetensors_file import INDEX_SUFFIX, read_index
from slipway.model.sentences import sentence_files
from slipway.texts import printable

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_LONGEST_COMMIT = 200
_COMMIT = re.compile(r"\w[\w.-]*\s*")
"""Name of a snapshot's folder in the hub's cache."""
LEFTOVERS = ("_name_or_path", "gradient_checkpointing", "_commit_hash")
"""Keys of a configuration that describe where or how a model was trained, not what it is."""
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
TOKENIZER_SETTINGS = "tokenizer_config.json"
#: A model's processing of images, sound and video; a tokenizer is saved with or without it.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
#: Files of a tokenizer (or processor), as saved by transformers for all families.
TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "normalizer.json",
    "sentencepiece.bpe.model",
    "source.spm",
    "special_tokens_map.json",
    "spiece.model",
    "spm.model",
    "target.spm",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    TOKENIZER_SETTINGS,
    "vocab.json",
    "vocab.txt",
    *PROCESSOR_FILES,
    *CHAT_TEMPLATES,
)
#: Folder of named chat templates beside the default one.
CHAT_TEMPLATE_FOLDER = "additional_chat_templates"
_TEMPLATE_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
#: Beginning of the names of an adapter's tensors.
ADAPTER_PREFIX = "base_model.model."
MODEL_WEIGHTS = "model.safetensors"
MODEL_INDEX = f"model{INDEX_SUFFIX}"
MODEL_PICKLE = "pytorch_model.bin"
MODEL_PICKLE_INDEX = f"{MODEL_PICKLE}.index.json"


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer and chat-template files of a folder, sorted.

    Raises:
        ArtifactError: As :func:`slipway.files.paths.file_in`, like all lists in this module.
    """
    more = (path.relative_to(folder) for path in (folder / CHAT_TEMPLATE_FOLDER).glob("*.jinja"))
    return sorted(files_in(folder, (*TOKENIZER_FILES, *more)))


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer in a folder has a chat template that applies without naming one."""
    if (folder / CHAT_TEMPLATES[0]).is_file():
        return True
    template = read_object_or_empty(folder / TOKENIZER_SETTINGS).get("chat_template")
    named = template if isinstance(template, list) else []  # as older tokenizers hold several of them
    return isinstance(template, str) or any(isinstance(one, dict) and one.get("name") == "default" for one in named)


def chat_templates(folder: Path) -> dict[str, bytes]:
    """Return a tokenizer's chat templates by the names of their files, also those that older ones keep in ``tokenizer_config.json``.

    A file wins over a template of the same name in the settings. A template in the settings without a usable name or text is left out.
    """
    files = ((path.relative_to(folder).as_posix(), path) for path in tokenizer_files(folder))
    return _read_templates_in_settings(folder) | {
        name: path.read_bytes() for name, path in files if is_chat_template(name)
    }


def processor_settings(folder: Path, part: str) -> list[dict[str, Any]]:
    """Return the settings of a part of a model's processor from each file that has any, the preferred one first.

    Args:
        folder: The model's folder.
        part: ``image_processor`` or ``feature_extractor``. Up to version 4 transformers gave it a file of its own.
    """
    own, whole = (read_object_or_empty(folder / name) for name in PROCESSOR_FILES[:2])
    return [settings for settings in (own, whole.get(part)) if isinstance(settings, dict) and settings]


def is_chat_template(name: str) -> bool:
    """Return whether a file of a tokenizer, named as within its folder, holds a chat template."""
    return name in CHAT_TEMPLATES or name.startswith(f"{CHAT_TEMPLATE_FOLDER}/")


def _read_templates_in_settings(folder: Path) -> dict[str, bytes]:
    template = read_object_or_empty(folder / TOKENIZER_SETTINGS).get("chat_template")
    named = template if isinstance(template, list) else [{"name": "default", "template": template}]
    templates: dict[str, bytes] = {}
    for one in named:
        name, text = (one.get("name"), one.get("template")) if isinstance(one, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(name, str) or not _TEMPLATE_NAME.fullmatch(name):
            continue
        file = CHAT_TEMPLATES[0] if name == "default" else f"{CHAT_TEMPLATE_FOLDER}/{name}.jinja"
        with contextlib.suppress(UnicodeEncodeError):
            templates[file] = text.encode()
    return templates


def companion_files(folder: Path) -> list[Path]:
    """Return the files beside a model's weights, sorted: configuration, generation settings, tokenizer, chat templates, pooling."""
    own = files_in(folder, (CONFIG, GENERATION_CONFIG))
    return sorted([*own, *tokenizer_files(folder), *sentence_files(folder)])


def copy_companions(source: Path, target: Path) -> None:
    """Copy :func:`companion_files` into an existing folder; contents only, because inputs may be read-only."""
    for path in companion_files(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(real_file(source, path.relative_to(source)), copy)


def travelling_files(folder: Path) -> list[Path]:
    """Return a checkpoint's files to copy: adapter configuration and weights, tokenizer, chat template, generation settings, pooling.

    A ``config.json`` beside them names the labels of a head that was trained.
    """
    own = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, GENERATION_CONFIG)
    return sorted([*files_in(folder, own), *tokenizer_files(folder), *sentence_files(folder)])


def model_files(folder: Path) -> list[Path]:
    """Return a model's files to copy: configuration, weights (the shards its index names), tokenizer, chat template, pooling.

    Weights are safetensors or, if there are none, the ``pytorch_model.bin`` files that the prepare stage converts.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` if the configuration, the weights or a shard is missing.
        ArtifactError: As :func:`slipway.files.paths.file_in`, before anything is read.
    """
    named = files_in(folder, (CONFIG, MODEL_WEIGHTS, MODEL_INDEX, MODEL_PICKLE, MODEL_PICKLE_INDEX, GENERATION_CONFIG))
    if folder / CONFIG not in named:
        adapter = (folder / ADAPTER_CONFIG).is_file()
        raise CheckpointValidationError(
            f"{folder} is an adapter, not a base model" if adapter else f"{folder} has no {CONFIG}",
            reason="BASE_MODEL_INVALID",
            remedy=f"give it as the run ({folder}), and its base with --base-model, or leave that out: the adapter names its base"
            if adapter
            else "name a Hugging Face model folder",
            about={"folder": folder},
        )
    if has_safetensors(folder):
        weights = [MODEL_WEIGHTS]
        if folder / MODEL_WEIGHTS not in named:
            weights = [MODEL_INDEX, *sorted(set(read_index(folder / MODEL_INDEX).values()))]
    else:
        index = [MODEL_PICKLE_INDEX] if folder / MODEL_PICKLE not in named else []
        weights = [*index, *(path.name for path in sorted(set(pickle_files(folder).values())))]
    own = files_in(folder, (CONFIG, *weights, GENERATION_CONFIG))
    return sorted([*own, *tokenizer_files(folder), *sentence_files(folder)])


def has_safetensors(folder: Path) -> bool:
    """Return whether a model's weights are safetensors; true also without any weights, so that errors ask for safetensors."""
    pickles = (folder / MODEL_PICKLE, folder / MODEL_PICKLE_INDEX)
    return any((folder / name).is_file() for name in (MODEL_WEIGHTS, MODEL_INDEX)) or not any(
        map(Path.is_file, pickles)
    )


def pickle_files(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor in a model of ``pytorch_model.bin`` files; a single file has no index and the name ``""``.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` if the index is unreadable or a shard is missing.
    """
    if (folder / MODEL_PICKLE).is_file():
        return {"": folder / MODEL_PICKLE}
    return {name: folder / shard for name, shard in read_index(folder / MODEL_PICKLE_INDEX).items()}


def resolve_base_model(name: str, *, revision: str | None = None) -> Path:
    """Return the folder of a base model: a local folder, or its snapshot in the local Hugging Face cache. Never download.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_NOT_FOUND`` or ``BASE_MODEL_INVALID``.
    """
    try:
        local = user_path(name)
        folder = local.resolve() if local.is_dir() else cached_snapshot(name, revision)
    except OSError:  # a name that no file system allows
        folder = cached_snapshot(name, revision)
    model_files(folder)
    return folder


def check_cached_reference(name: str, revision: str | None) -> None:
    """Refuse a reference in the local Hugging Face cache that names no snapshot; the hub's library would follow or wait for it.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID``.
    """
    reference = _cache_folder(name) / "refs" / (revision or "main")
    if not os.path.lexists(reference):  # methods of Path fail on impossible names
        return
    try:
        commit = read_regular(reference, largest=_LONGEST_COMMIT).decode()
        good = _COMMIT.fullmatch(commit) is not None
    except (OSError, ValueError):  # not a regular file, too long, or no text
        good = False
    if not good:
        raise CheckpointValidationError(
            f"{reference} names no snapshot",
            reason="BASE_MODEL_INVALID",
            remedy=f"remove it, and download the model again: hf download {name}",
            about={"file": reference},
        )


def is_cached(name: str) -> bool:
    """Return whether the local Hugging Face cache knows a repository, whole or in part; the library that fetches is not imported."""
    try:
        return _cache_folder(name).is_dir()
    except (ImportError, OSError, ValueError):
        return False


def _cache_folder(repository: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}")


def cached_snapshot(name: str, revision: str | None = None) -> Path:
    """Return the folder of a repository's snapshot in the local Hugging Face cache.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_NOT_FOUND``.
    """
    remedy = f"download it first: hf download {name}; or let it be downloaded: --base-model hf://{name}; or give the path of its folder"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise CheckpointValidationError(
            f"base model {name!r} is not a folder, and huggingface_hub, which reads the local cache, is not installed",
            reason="BASE_MODEL_NOT_FOUND",
            remedy="give the path of its folder, or pip install huggingface_hub",
            about={"base_model": printable(name)},
        ) from error
    try:
        check_cached_reference(name, revision)
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except HFValidationError as error:  # neither an existing folder nor a possible repository name
        what = f"base model {name!r} does not exist as a folder"
        remedy = "give the path of its folder, or a repository's id that is in the local Hugging Face cache"
        cause: Exception = error
    except LocalEntryNotFoundError as error:
        what = f"base model {name!r} is neither a folder nor in the local Hugging Face cache"
        cause = error
    raise CheckpointValidationError(
        what, reason="BASE_MODEL_NOT_FOUND", remedy=remedy, about={"base_model": printable(name)}
    ) from cause

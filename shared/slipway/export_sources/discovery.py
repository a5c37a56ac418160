"""Find the sources of an export: base model, checkpoint, texts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from slipway.base_match import BaseMatch, BaseMatchStatus
from slipway.base_match.evidence import UsedBase, match_base
from slipway.base_match.recorded import recorded_base, repository_of
from slipway.configuration import ExportConfiguration
from slipway.configuration.calibration import may_read_text
from slipway.errors import ArtifactError, ConfigurationError, ModelExportError
from slipway.export_sources.naming import source_settings, title
from slipway.export_sources.text_files import (
    CALIBRATION_KEY,
    HELDOUT_KEY,
    check_apart,
    check_texts,
    find_own_text,
    folder_of,
    sample_of_run,
    text_files,
)
from slipway.files.paths import real_file
from slipway.model.base_format import base_format, check_kind
from slipway.model.configuration import ModelConfig
from slipway.model.folder import ModelFolder
from slipway.model.model_files import ADAPTER_CONFIG, model_files, resolve_base_model, travelling_files
from slipway.model.runs.checkpoints import Checkpoint, find_checkpoint, read_adapter_config
from slipway.model.runs.saved_weights import whole_model_beside
from slipway.model.trained import TrainedModel, trained_model
from slipway.planning.calibration import SOURCE as CALIBRATION
from slipway.planning.division import weight_bytes
from slipway.planning.references import by_source_name
from slipway.sources import SourceFolders
from slipway.sources.addresses import HUB, is_repository
from slipway.texts import one_line, printable
from slipway.validation.inputs import OWN_TEXT, TEST_INPUTS, find_sounds, find_test_inputs


@dataclass(frozen=True)
class Sources:
    """The folders of an export.

    Attributes:
        base: Folder of the base model.
        base_name: Its name as given by the user or the adapter.
        checkpoint: The chosen checkpoint; None for a model that is exported as it is.
        more: Further checkpoints whose adapters are combined with it.
        heldout: File or folder with held-out text, or None.
        calibration: File or folder with text for calibration, or None.
        test_inputs: File with the user's test inputs, or None.
        base_match: The files' verdict on whether the base is the one the adapter was trained on; None without an adapter.
        formats: Formats of sources that must be prepared first, by source (``slipway.model.base_format``).
        trained: The class the adapter was trained on, if it brings a head that the base lacks; None also without transformers.
        config: Configuration of the merged model, if it is not the base's own; None also without transformers.
        warnings: Warnings from the search.
        folders: Knows which of them are in a bucket, and their names.
        sounds: Sound files of the test inputs.
        own_text: File with text like that of the training, on which the adapter is judged, or None.
    """

    base: Path
    base_name: str
    checkpoint: Checkpoint | None
    more: tuple[Checkpoint, ...]
    heldout: Path | None
    calibration: Path | None
    test_inputs: Path | None
    base_match: BaseMatch | None
    formats: Mapping[str, str]
    trained: TrainedModel | None
    config: ModelConfig | None
    warnings: tuple[str, ...]
    folders: SourceFolders
    sounds: tuple[Path, ...] = ()
    own_text: Path | None = None

    def files(self) -> dict[str, dict[str, Path]]:
        """Return the real paths of files to store, by source and path inside the artifact, without training leftovers.

        Raises:
            ArtifactError: A link leads out of its folder, or a file is missing.
        """
        files = {"base": files_by_name(self.base, model_files(self.base))}
        if self.checkpoint is not None:
            files["adapter"] = files_by_name(self.checkpoint.path, travelling_files(self.checkpoint.path))
        for name, checkpoint in by_source_name(self.more).items():
            files[name] = files_by_name(checkpoint.path, travelling_files(checkpoint.path))
        if self.heldout is not None:
            files["heldout"] = files_by_name(folder_of(self.heldout), text_files(self.heldout))
        if self.calibration is not None:
            files[CALIBRATION] = files_by_name(folder_of(self.calibration), text_files(self.calibration))
        if self.test_inputs is not None:
            files[TEST_INPUTS] = files_by_name(self.test_inputs.parent, [self.test_inputs, *self.sounds])
        if self.own_text is not None:
            files[OWN_TEXT] = files_by_name(self.own_text.parent, [self.own_text])
        return files

    @property
    def weight_bytes(self) -> int:
        """Return the size of the base's weights."""
        return weight_bytes({path.name: path.stat().st_size for path in model_files(self.base)})

    @property
    def model_name(self) -> str:
        """Name of the fine-tuned model: the training run's folder, or without an adapter the model's own name."""
        if self.checkpoint is not None:
            return model_name(self.checkpoint.path)
        return plain_name(self.base, self.base_label)

    @property
    def title(self) -> str:
        """Title for people, such as ``checkpoint-40 of h_half onto qwen3-base``."""
        if self.checkpoint is None:
            return self.base_label
        names = {"checkpoint": self.checkpoint.path.name, "model_name": self.model_name, "base_model": self.base_label}
        return title(names, more=[each.path.name for each in self.more])

    @property
    def base_label(self) -> str:
        """Name of the base model for people."""
        return base_label(self.base, self.base_name)

    def labels(self) -> dict[str, str]:
        """Return the names of the sources for people, and the base model's size for the choice of a recovery profile."""
        labels = {
            "base_model": self.base_label,
            "model_name": self.model_name,
            "model_bytes": str(sum(path.stat().st_size for path in self.files()["base"].values())),
        }
        if self.checkpoint is not None:
            labels |= checkpoint_labels(self.checkpoint)
        if self.base_match is not None:
            labels |= self.base_match.labels()
        return clean_labels(labels)


def find_sources(
    configuration: ExportConfiguration,
    folders: SourceFolders,
    *,
    origins: Mapping[str, str] = MappingProxyType({}),
    here: bool = True,
) -> Sources:
    """Find the sources that the configuration names; they can be used while ``folders`` is open.

    Args:
        configuration: Settings of the export.
        folders: Opens folders, buckets and digests.
        origins: Where each setting came from, for error messages.
        here: Whether the base that an adapter names may be a folder of this machine; otherwise it is a hub repository.

    Raises:
        ArtifactError: Nothing exists under an address in a bucket, or under a digest.
        CheckpointValidationError: No usable checkpoint or base model, or a base that the adapter was not trained on.
        ConfigurationError: No base model is named anywhere, or the held-out text is missing.
        QuantizationError: ``CALIBRATION_OVERLAP``: the text for calibration is the held-out text, or too little of it is apart.
    """
    try:
        sources = _find(configuration, folders, origins, here=here)
    except ModelExportError as error:
        raise folders.name_sources(error) from error
    return replace(sources, warnings=tuple(printable(folders.show(warning)) for warning in sources.warnings))


def _find(
    configuration: ExportConfiguration, folders: SourceFolders, origins: Mapping[str, str], *, here: bool
) -> Sources:
    checkpoint = None
    if configuration.checkpoint.path:
        with _name_setting(_setting_and_origin("checkpoint.path", origins)):
            checkpoint = choose_checkpoint(configuration, folders, configuration.checkpoint.path)
    more = tuple(choose_checkpoint(configuration, folders, path) for path in configuration.combination.adapters)
    name = name_of_base(configuration, checkpoint, here=here)
    heldout = folders.find(configuration.validation.heldout) if configuration.validation.heldout else None
    if heldout is not None:
        check_texts(heldout, HELDOUT_KEY)
    by_adapter = f"base_model_name_or_path in {checkpoint.path / ADAPTER_CONFIG}" if checkpoint else ""
    instead = "" if configuration.base_model.name else "or name another with --base-model or base_model.name"
    with _name_setting(
        _setting_and_origin("base_model.name", origins) if configuration.base_model.name else by_adapter, instead
    ):
        base = resolve_base_model(str(folders.find(name)))
    kind = configuration.base_model.model_type
    model = ModelFolder.open(base)
    check_kind(model, kind)
    stored_as = base_format(model)
    repository, revisions = folders.snapshot(base)
    used = UsedBase(
        base,
        base_label(base, name),
        contents=folders.has_contents(base),
        repository=repository,
        revisions=revisions,
        look=here,
    )
    adapters = (checkpoint, *more) if checkpoint else ()
    base_match = None
    if adapters:
        base_match = match_base(used, [each.path for each in adapters], trust=configuration.base_model.trust)
    trusted = (base_match.reason,) if base_match and base_match.status is BaseMatchStatus.TRUSTED else ()
    calibration, left_out = text_for_calibration(configuration, folders, checkpoint, here=here)
    judged = heldout if configuration.validation.enabled else None
    overlap = check_apart(configuration, folders, calibration=calibration, heldout=judged) if here else ()
    test_inputs, sounds = inputs_to_answer(configuration, folders)
    beside = checkpoint.path if checkpoint and folders.has_contents(checkpoint.path) else None
    trained, config = _find_merged(model, checkpoint.path if checkpoint and not more else None, kind)
    return Sources(
        base=base,
        base_name=name,
        checkpoint=checkpoint,
        more=more,
        heldout=judged,
        calibration=calibration,
        test_inputs=test_inputs,
        base_match=base_match,
        formats={"base": stored_as} if stored_as else {},
        trained=trained,
        config=config,
        warnings=(
            *(warning for each in adapters for warning in each.warnings),
            *whole_model_warnings(adapters, base),
            *trusted,
            *left_out,
            *overlap,
        ),
        folders=folders,
        sounds=sounds,
        own_text=find_own_text(configuration, beside, calibration, base_match),
    )


def whole_model_warnings(adapters: Iterable[Checkpoint], base: Path | None) -> tuple[str, ...]:
    """Return a warning for each adapter with the weights of a whole model beside it, which are left out unless they are the base's."""
    return tuple(
        f"{each.path} also holds the weights of a whole model ({printable(name)}), which are left out: the adapter is merged into "
        "the base model; to export those instead, name the folder as --base-model with --checkpoint none"
        for each in adapters
        if (base is None or each.path.resolve() != base.resolve()) and (name := whole_model_beside(each.path))
    )


def text_for_calibration(
    configuration: ExportConfiguration, folders: SourceFolders, checkpoint: Checkpoint | None, *, here: bool
) -> tuple[Path | None, tuple[str, ...]]:
    """Return the text for calibration, and warnings; an import uses only text that the settings name."""
    named = configuration.optimization.calibration
    if here and not may_read_text(configuration):
        return None, ()
    if named:
        return check_texts(folders.find(named), CALIBRATION_KEY), ()
    return sample_of_run(checkpoint.path) if checkpoint is not None and here else (None, ())


def inputs_to_answer(
    configuration: ExportConfiguration, folders: SourceFolders
) -> tuple[Path | None, tuple[Path, ...]]:
    """Return the file of the test inputs, None for none, and their sounds."""
    named = source_settings(configuration).get(TEST_INPUTS)
    if not named:
        return None, ()
    file = find_test_inputs(folders.find(named))
    return file, find_sounds(file, here=folders.has_contents(file.parent))


def choose_checkpoint(configuration: ExportConfiguration, folders: SourceFolders, path: str) -> Checkpoint:
    """Return the checkpoint that the configuration chooses at a path, which may be a run."""
    wanted = configuration.checkpoint
    return find_checkpoint(folders.find(path), auto_detect_latest=wanted.auto_detect_latest, select=wanted.select)


def name_of_base(configuration: ExportConfiguration, checkpoint: Checkpoint | None, *, here: bool) -> str:
    """Return the name of the base model in the configuration, or else in the adapter.

    Raises:
        ConfigurationError: Neither names one.
    """
    name = configuration.base_model.name or (_base_of_adapter(checkpoint, here=here) if checkpoint else "")
    if name:
        return name
    names_none = f"{checkpoint.path / ADAPTER_CONFIG} names no base model" if checkpoint else "there is no checkpoint"
    raise ConfigurationError(
        f"base_model.name is not set, and {names_none}",
        remedy="set base_model.name, EXPORT_BASE_MODEL or --base-model",
        about={"key": "base_model.name"},
    )


def _find_merged(base: ModelFolder, adapter: Path | None, kind: str) -> tuple[TrainedModel | None, ModelConfig | None]:
    """Return the class that the adapter was trained on and the merged model's configuration, each None if it is the base's.

    Both are None without transformers, because only the merge can tell then. The class is also None if the settings name the base's kind.
    """
    try:
        if kind:
            return None, base.config.of_type(kind)
        trained = trained_model(base, adapter) if adapter else None
    except ModuleNotFoundError:
        return None, None
    return trained, trained.config if trained else None


def _setting_and_origin(key: str, origins: Mapping[str, str]) -> str:
    origin = origins.get(key, "")
    return f"{key} ({origin})" if origin and origin != "default" else key


@contextlib.contextmanager
def _name_setting(where: str, instead: str = "") -> Iterator[None]:
    """Add to a not-found error the setting that named the missing thing, and a setting that can replace it."""
    try:
        yield
    except ModelExportError as error:
        if not error.reason.endswith("_NOT_FOUND"):
            raise
        raise type(error)(
            f"{error.message}; it is named by {where}",
            reason=error.reason,
            remedy="; ".join(part for part in (error.remedy, instead) if part),
            about={**error.about, "named_by": where},
            retryable=error.retryable,
        ) from error


def base_label(base: Path, name: str) -> str:
    """Return a base model's name for people: a repository's id, or its folder's name; never a path of this machine."""
    repository = repository_of(base)
    if repository:
        return repository
    return base.name if Path(name).is_absolute() or not name else name


def _base_of_adapter(checkpoint: Checkpoint, *, here: bool) -> str:
    """Return the base model that the adapter's configuration names, as its folder if found; empty if it names none."""
    recorded = recorded_base(checkpoint.path, read_adapter_config(checkpoint.path), look=here)
    if here:
        return recorded.name if recorded.folder is None else str(recorded.folder)
    if is_repository(recorded.name):
        return f"{HUB}{recorded.name}" + (f"@{recorded.revision}" if recorded.revision else "")
    if recorded.name:
        raise ConfigurationError(
            f"base_model.name is not set, and the adapter names {recorded.label}, a folder of the machine it was trained on",
            remedy="set base_model.name to s3://bucket/prefix or hf://owner/name",
            about={"key": "base_model.name"},
        )
    return ""


def model_name(checkpoint: Path) -> str:
    """Return the name of a fine-tuned model: the training run's folder, or the repository it was read from."""
    path = checkpoint.resolve()
    run = path.parent if path.name.startswith("checkpoint-") else path
    return repository_of(run).rpartition("/")[2] or run.name


def checkpoint_labels(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the labels that a checkpoint gives to its export."""
    step = "" if checkpoint.step is None else str(checkpoint.step)
    return {"checkpoint": checkpoint.path.name, "checkpoint_step": step, "model_name": model_name(checkpoint.path)}


def clean_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels without characters that a coordinator refuses; names of folders and files may have any."""
    return {name: one_line(value) for name, value in labels.items()}


def plain_name(base: Path, label: str) -> str:
    """Return the name of a model that is exported as it is: its training run's, or the last part of its label."""
    if base.name.startswith("checkpoint-"):
        return model_name(base)
    return label.partition("@")[0].rstrip("/").rpartition("/")[2] or base.name


def files_by_name(folder: Path, files: list[Path]) -> dict[str, Path]:
    """Return the files of a folder by their path in it.

    Raises:
        ArtifactError: ``FILE_ERROR``: there are none.
    """
    if not files:
        raise ArtifactError(f"{folder} has no files to export", reason="FILE_ERROR", about={"folder": folder})
    names = [path.relative_to(folder) for path in files]
    return {name.as_posix(): real_file(folder, name) for name in names}

"""Publish to MLflow: the folder as the artifacts of a run, and a version of a registered model last.

A version is looked for by the digest of all files. One that is there already is not made again; a run without a version is not
published, and is marked as ended by the next step that fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from slipway.distribution import require
from slipway.errors import ArtifactError, ModelExportError
from slipway.publishing.destination import Access, OnWait, Published, destination_error
from slipway.publishing.publication import PublishedOutput
from slipway.publishing.release import OnBytes, Release, ReleasedFile
from slipway.texts import one_line, redact, redact_address, shortened

_ADDRESS = re.compile(r"mlflow:(?://)?(?P<name>[^\W_][\w .-]{0,199})")
_FOLDER = "export"
_IDENTITY = "slipway.files"
_SERVER = "MLFLOW_TRACKING_URI"
_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"
_DENIED = frozenset({"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"})
_PASSING = frozenset({"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"})


class MlflowDestination:
    """:class:`~slipway.publishing.destination.Destination` in the registry of an MLflow server.

    Args:
        url: ``mlflow:NAME``, the registered model.
        access: The environment, with the server's address in ``MLFLOW_TRACKING_URI``.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID``.
        ServiceError: ``UNSUPPORTED`` if the extra is not installed.
    """

    by_content = False

    def __init__(self, url: str, access: Access) -> None:
        parts, server = _ADDRESS.fullmatch(url), access.environment.get(_SERVER, "")
        if parts is None:
            raise destination_error(url, "write mlflow:NAME, with letters, digits, spaces, dots and dashes")
        if not server:
            raise destination_error(url, f"{_SERVER} does not say which server")
        require("mlflow", what="MLflow")
        with _no_telemetry():
            from mlflow import MlflowClient

        self._name, self._where = parts["name"], redact_address(server)
        self._experiment = access.environment.get("MLFLOW_EXPERIMENT_NAME") or self._name
        with self._translate_errors("opening"):
            self._client = MlflowClient(tracking_uri=server)
        self._version, self._run = "", ""

    def reach(self) -> None:
        """As :meth:`~slipway.publishing.destination.Destination.reach`.

        Raises:
            ArtifactError: ``STORE_UNAVAILABLE``, ``STORE_DENIED``, ``STORE_INVALID``.
        """
        with self._translate_errors("asking"):
            self._client.search_registered_models(max_results=1)

    def begin(self, release: Release) -> None:
        """Look for a version of these files; open a run if there is none."""
        identity = _identity(release)
        with self._translate_errors("looking for a version in"):
            self._version = next(self._versions(identity), "")
            if self._version:
                return
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
            run = self._client.create_run(experiment, run_name=release.publication.export_id, tags=_tags(release))
            self._run = run.info.run_id

    def has(self, file: ReleasedFile, *, on_wait: OnWait) -> bool:  # noqa: ARG002 - known since it began
        """Return whether a version has all files: those of a run that was not finished are sent again."""
        return bool(self._version)

    def send(self, file: ReleasedFile, *, on_bytes: OnBytes) -> int:
        """As :meth:`~slipway.publishing.destination.Destination.send`."""
        on_bytes(0)
        place = PurePosixPath(_FOLDER, file.path)
        if file.real.name != place.name:
            raise ArtifactError(
                f"{file.path} is a link to a file of another name, which MLflow does not store",
                reason="ARTIFACT_INVALID",
                remedy="put a copy of the file in its place",
                about={"file": file.path},
            )
        with file.opened(), self._translate_errors(f"sending {file.path} to"):
            self._client.log_artifact(self._run, str(file.real), artifact_path=str(place.parent))
        on_bytes(file.size_bytes)
        return file.size_bytes

    def commit(self, release: Release) -> Published:
        """Make the version; figures of the outputs are metrics of its run."""
        if not self._version:
            with self._translate_errors("registering with"):
                for name, value in sorted(_figures(release.publication.outputs).items()):
                    self._client.log_metric(self._run, name, value)
                self._make_model()
                source = f"{self._client.get_run(self._run).info.artifact_uri}/{_FOLDER}"
                self._client.update_run(self._run, status="FINISHED")
                tags = {**_tags(release), _IDENTITY: _identity(release)}
                version = self._client.create_model_version(self._name, source, run_id=self._run, tags=tags)
            self._version, self._run = str(version.version), ""
        return Published(f"models:/{self._name}/{self._version}", details={"version": self._version})

    def close(self) -> None:
        """Mark a run as ended of which no version was made."""
        if self._run:
            with contextlib.suppress(ModelExportError), self._translate_errors("ending a run of"):
                self._client.update_run(self._run, status="KILLED")

    def _versions(self, identity: str) -> Iterator[str]:
        token = None
        while True:
            page = self._client.search_model_versions(f"name='{self._name}'", page_token=token)
            yield from (
                str(each.version) for each in page if each.status == "READY" and each.tags.get(_IDENTITY) == identity
            )
            token = page.token
            if not token:
                return

    def _make_model(self) -> None:
        from mlflow import MlflowException

        try:
            self._client.create_registered_model(self._name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    @contextlib.contextmanager
    def _translate_errors(self, doing: str) -> Iterator[None]:
        from mlflow import MlflowException
        from requests import RequestException

        try:
            yield
        except MlflowException as error:
            code = str(error.error_code)
            reason = "STORE_DENIED" if code in _DENIED else "STORE_UNAVAILABLE" if code in _PASSING else "STORE_INVALID"
            raise self._error(doing, code, error, reason) from error
        except RequestException as error:
            status = error.response.status_code if error.response is not None else 503
            reason = (
                "STORE_DENIED" if status in (401, 403) else "STORE_UNAVAILABLE" if status >= 500 else "STORE_INVALID"
            )
            raise self._error(doing, str(status), error, reason) from error

    def _error(self, doing: str, code: str, error: Exception, reason: str) -> ArtifactError:
        remedies = {
            "STORE_DENIED": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
            "STORE_UNAVAILABLE": f"check that the server runs and that {_SERVER} names it, then try again",
        }
        return ArtifactError(
            f"{doing} the MLflow server {self._where}: {code}: {shortened(one_line(redact(str(error))))}",
            reason=reason,
            remedy=remedies.get(reason, f"check that {_SERVER} names an MLflow server"),
            about={"server": self._where, "model": self._name},
        )


@contextlib.contextmanager
def _no_telemetry() -> Iterator[None]:
    """Import MLflow so that it sends nothing to others than the server: it decides about that at its import, by a variable."""
    before = os.environ.get(_TELEMETRY)
    os.environ[_TELEMETRY] = before or "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TELEMETRY]


def _identity(release: Release) -> str:
    """Return a digest of all files, with the proof."""
    lines = "".join(f"{file.sha256}  {file.path}\n" for file in release.files)
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def _tags(release: Release) -> dict[str, str]:
    publication = release.publication
    return {
        "slipway.export": publication.export_id,
        "slipway.verdict": publication.outcome.value,
        "slipway.signed": "true" if release.signed else "false",
        **({"slipway.license": release.licence} if release.licence else {}),
        **{f"slipway.status.{output.name}": output.status for output in publication.outputs},
        **{f"slipway.source.{name}": digest for name, digest in sorted(publication.sources.items())},
    }


def _figures(outputs: tuple[PublishedOutput, ...]) -> dict[str, float]:
    figures: dict[str, Any] = {}
    for output in outputs:
        found = output.validation
        figures[f"{output.name}/size_bytes"] = output.size_bytes
        figures[f"{output.name}/mean_kl"] = found.to_reference.mean_kl if found and found.to_reference else None
        figures[f"{output.name}/kept"] = found.kept if found else None
    return {name: float(value) for name, value in figures.items() if value is not None}

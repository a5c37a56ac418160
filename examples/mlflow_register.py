"""Register the result of an export with MLflow: the delivered model as a version, with its figures, lineage and report.

    slipway export -c export.yaml
    python examples/mlflow_register.py exported_models/qwen3_20261121_020758 --format onnx-int8 --name qwen3-support

An artifact is registered once: another run finds the version by its digest, and prints it again. Needs ``pip install mlflow``; the
tracking server is set by MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

EXIT_REFUSED, EXIT_INVALID, EXIT_UNSUPPORTED = 1, 3, 6


def figures(report: dict[str, Any], model: str) -> dict[str, float]:
    """Return the figures of one format, by metric name."""
    formats = report["result"]["formats"]
    return {
        key: float(value)
        for key, value in sorted(formats[model].items())
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def tags(report: dict[str, Any], model: str) -> dict[str, str]:
    """Return the tags that identify the version: the export, the artifact, the sources."""
    result = report["result"]
    found = {
        "slipway.export_id": result["export_id"],
        "slipway.format": model,
        "slipway.digest": result["formats"][model]["digest"],
        "slipway.validation.findings": result["formats"][model]["status"],
    }
    for name, digest in sorted(report["lineage"].get("sources", {}).items()):
        found[f"slipway.source.{name}"] = str(digest)
    return found


def find_version(client: Any, name: str, wanted: dict[str, str]) -> str | None:
    """Return the version that holds the same artifact in the same format, or None.

    Args:
        client: Client of the tracking server.
        name: Registered model; it may not exist yet.
        wanted: Tags of the version, from :func:`tags`.
    """
    quote = '"' if "'" in name else "'"
    token: str | None = None
    while True:
        page = client.search_model_versions(f"name={quote}{name}{quote}", page_token=token)
        for version in page:
            if version.status == "READY" and all(
                version.tags.get(key) == wanted[key] for key in ("slipway.digest", "slipway.format")
            ):
                return str(version.version)
        token = page.token
        if not token:
            return None


def register(folder: Path, *, model: str, name: str) -> tuple[str, bool]:
    """Log the model's folder and the report in a run, and make the model a version, unless it is one already.

    The version is made last, so after an interruption the same command can be run again.

    Returns:
        The version, and whether it is new.
    """
    import mlflow  # noqa: PLC0415 - optional: main() reports if it is missing

    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    if not report["result"]["success"]:
        raise ValueError(f"the export in {folder} did not succeed: {report['result']['error_message']}")
    if model not in report["result"]["formats"]:
        raise ValueError(f"{folder} has no {model}; it has {', '.join(sorted(report['result']['formats']))}")
    client = mlflow.MlflowClient()
    found = find_version(client, name, tags(report, model))
    if found is not None:
        return found, False
    with mlflow.start_run(run_name=report["result"]["export_id"]) as run:
        mlflow.set_tags(tags(report, model))
        mlflow.log_metrics(figures(report, model))
        mlflow.log_artifacts(str(folder / model), artifact_path=model)
        for document in ("report.html", "report.json", "lineage.json", "MANIFEST.sha256"):
            mlflow.log_artifact(str(folder / document))
        try:
            client.create_registered_model(name)
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # Log the folder unchanged: mlflow.register_model accepts only models that a flavor of MLflow has logged.
        version = client.create_model_version(
            name, mlflow.get_artifact_uri(model), run_id=run.info.run_id, tags=tags(report, model)
        )
    return str(version.version), True


def main() -> int:
    """Register the model and print the version."""
    parser = argparse.ArgumentParser(description="Register the result of an export with MLflow.")
    parser.add_argument("folder", type=Path, help="output directory of an export")
    parser.add_argument("--format", default="pytorch", dest="model", help="delivered format to register")
    parser.add_argument("--name", required=True, help="registered model")
    arguments = parser.parse_args()
    try:
        from mlflow import MlflowException  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        if error.name != "mlflow":
            raise
        print("mlflow is not installed: pip install mlflow", file=sys.stderr)
        return EXIT_UNSUPPORTED
    try:
        version, new = register(arguments.folder, model=arguments.model, name=arguments.name)
    except MlflowException as error:
        print(f"MLflow refused {arguments.folder}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except (OSError, ValueError) as error:
        print(f"cannot register {arguments.folder}: {error}", file=sys.stderr)
        return EXIT_INVALID
    if not new:
        print("this artifact is already registered", file=sys.stderr)
    print(f"{arguments.name} version {version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A fine-tuned model as an asset of Dagster: copy this file and slipway_http.py beside your definitions.

Materializing it exports a training run at a Slipway coordinator. The materialization shows formats, verdicts, KL divergence and sizes;
its data version changes with the content of the outputs. A terminated run cancels the export; one that is repeated continues it.
"""

# Annotations are read as they are by Dagster, so none of them is postponed.
from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field
from slipway_http import Output, Slipway, SlipwayError, request_id


class SlipwayCoordinator(dg.ConfigurableResource):
    """A coordinator that runs with ``--http``."""

    url: str
    project: str = "default"
    token: str = ""  # of a submitter: dg.EnvVar("SLIPWAY_TOKEN")
    ca_file: str = ""

    def client(self, context: dg.AssetExecutionContext) -> Slipway:
        """Return a client that writes into the log of a run."""
        return Slipway(self.url, project=self.project, token=self.token, ca_file=self.ca_file, tell=context.log.info)


class ModelExport(dg.Config):
    """What is exported.

    Attributes:
        checkpoint: Address of the training run, such as s3://bucket/prefix.
        base_model: Address of the base model; empty for the one that the adapter names.
        formats: Settings of each format by name, as ``ExportConfiguration.formats`` of the coordinator's ``/openapi.json``.
        more: Further settings, such as ``{"validation": {"effort": "quick"}}``.
    """

    checkpoint: str = ""
    base_model: str = ""
    formats: dict[str, Any] = Field(default={"onnx": {"quantization": {"levels": ["int8"]}}})
    more: dict[str, Any] = Field(default={})

    def configuration(self) -> dict[str, Any]:
        """Return the settings of the export."""
        named = {"checkpoint": {"path": self.checkpoint}} if self.checkpoint else {}
        named |= {"baseModel": {"name": self.base_model}} if self.base_model else {}
        return {**named, "formats": self.formats, **self.more}


@dg.asset(kinds={"slipway"})
def exported_model(
    context: dg.AssetExecutionContext, config: ModelExport, slipway: SlipwayCoordinator
) -> dg.MaterializeResult:
    """Models that can be served, made of a finished training run, each compared with the fine-tuned model."""
    # Of all tries of a run, and of a run that is repeated from its failure.
    run = context.run.root_run_id or context.run_id
    try:
        outputs = slipway.client(context).run(
            config.configuration(),
            request_id=request_id("dagster", run, context.asset_key.to_user_string()),
        )
    except SlipwayError as error:
        metadata = {"reason": error.reason, "remedy": error.remedy}
        raise dg.Failure(str(error), metadata=metadata, allow_retries=error.retryable) from error
    return dg.MaterializeResult(metadata=metadata_of(outputs), data_version=dg.DataVersion(version_of(outputs)))


def metadata_of(outputs: Mapping[str, Output]) -> dict[str, Any]:
    """Return a table of the outputs, and the figures that are plotted over time."""
    rows = [
        dg.TableRecord(
            {
                "format": name,
                "verdict": output.verdict,
                "KL": "" if output.mean_kl is None else f"{output.mean_kl:.1e}",
                "bytes": output.size_bytes,
                "digest": output.digest,
            }
        )
        for name, output in outputs.items()
    ]
    measured = {f"{name}/KL": output.mean_kl for name, output in outputs.items() if output.mean_kl is not None}
    sizes = {f"{name}/bytes": output.size_bytes for name, output in outputs.items()}
    return {"outputs": dg.MetadataValue.table(rows), **measured, **sizes}


def version_of(outputs: Mapping[str, Output]) -> str:
    """Return a text that differs with the content of the outputs."""
    return request_id(*(f"{name} {output.digest}" for name, output in sorted(outputs.items())))


defs = dg.Definitions(
    assets=[exported_model],
    resources={
        "slipway": SlipwayCoordinator(url=dg.EnvVar("SLIPWAY_URL"), token=dg.EnvVar("SLIPWAY_TOKEN")),
    },
)

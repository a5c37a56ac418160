"""An export as a component of Kubeflow Pipelines, and a pipeline of it: ``python pipeline.py`` writes export.yaml, to upload.

It only names the sources: workers import them, as far as SLIPWAY_IMPORT_FROM allows. The namespace of the runs needs the Secret
slipway-pipelines-tls; see docs/kubernetes.md. Needs ``pip install kfp kfp-kubernetes``.
"""

# Annotations are read as they are by kfp, so none of them is postponed.
from pathlib import Path

from kfp import compiler, dsl, kubernetes

FOLDER = Path(__file__).parent
STEP = FOLDER.with_name("step.sh")
SCRIPT = STEP.read_text(encoding="utf-8").partition("\n\n")[2]  # without the comment at its head
ENVIRONMENT = {
    "HOME": "/tmp",  # noqa: S108 - in the pod, where it is a volume of its own
    "SLIPWAY_HOME": "/tmp/slipway",  # noqa: S108 - as above
    "SLIPWAY_COORDINATOR": "slipway-coordinator.slipway.svc:7070",
    "SLIPWAY_PROJECT": "default",
    "SLIPWAY_TLS_CA_FILE": "/tls/ca.crt",
    "SLIPWAY_TLS_CERT_FILE": "/tls/tls.crt",
    "SLIPWAY_TLS_KEY_FILE": "/tls/tls.key",
}
TLS_SECRET = "slipway-pipelines-tls"  # noqa: S105 - its name


@dsl.container_component
def slipway_export(  # noqa: PLR0917 - kfp calls it by name
    checkpoint: str,
    base_model: str,
    formats: str,
    request_id: str,
    export: dsl.OutputPath(str),  # type: ignore[valid-type]
    digests: dsl.OutputPath(dict),  # type: ignore[valid-type]
) -> dsl.ContainerSpec:
    """Merge, quantize, export and validate a fine-tuned model; the step ends when the export has.

    Args:
        checkpoint: Training run, such as s3://bucket/prefix.
        base_model: Base model, such as hf://owner/name@revision.
        formats: Formats and levels, such as gguf:q4_k_m,onnx:int8.
        request_id: The same one again is the same export.
        export: Name of the export.
        digests: Digest of each output.
    """
    return dsl.ContainerSpec(
        image="slipway-coordinator:0.1.0",  # has the command
        command=["sh", "-ec", SCRIPT, "step"],
        args=[
            export,
            digests,
            f"--request-id={request_id}",
            f"--checkpoint={checkpoint}",
            f"--base-model={base_model}",
            f"-f{formats}",
        ],
    )


@dsl.pipeline(name="slipway-export")
def export_pipeline(checkpoint: str, base_model: str, formats: str = "onnx:int8") -> dict:
    """One step, which returns the digest of each output; in a pipeline of your own it follows the training."""
    task = slipway_export(
        checkpoint=checkpoint, base_model=base_model, formats=formats, request_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER
    )
    task.set_caching_options(enable_caching=False)  # Slipway's own store knows what was done before
    for name, value in ENVIRONMENT.items():
        task.set_env_variable(name, value)
    kubernetes.use_secret_as_volume(task, secret_name=TLS_SECRET, mount_path="/tls")
    kubernetes.add_pod_label(task, label_key="slipway.dev/client", label_value="true")
    return task.outputs["digests"]


if __name__ == "__main__":
    compiler.Compiler().compile(export_pipeline, package_path=str(FOLDER / "export.yaml"))

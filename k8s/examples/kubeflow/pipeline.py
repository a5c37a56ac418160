"""A pipeline that exports what was trained: ``python pipeline.py`` writes export.yaml, to upload to Kubeflow Pipelines.

Needs ``pip install kfp kfp-kubernetes``. The namespace of the runs has the Secret slipway-pipelines-tls.
"""

from pathlib import Path

from kfp import compiler, components, dsl, kubernetes

export_component = components.load_component_from_file(str(Path(__file__).with_name("component.yaml")))

ENVIRONMENT = {
    "HOME": "/tmp",  # noqa: S108 - in the pod, where it is a volume of its own
    "SLIPWAY_HOME": "/tmp/slipway",  # noqa: S108 - as above
    "SLIPWAY_COORDINATOR": "slipway-coordinator.slipway.svc:7070",
    "SLIPWAY_TLS_CA_FILE": "/tls/ca.crt",
    "SLIPWAY_TLS_CERT_FILE": "/tls/tls.crt",
    "SLIPWAY_TLS_KEY_FILE": "/tls/tls.key",
}
TLS_SECRET = "slipway-pipelines-tls"  # noqa: S105 - its name


@dsl.pipeline(name="slipway-export")
def export_pipeline(checkpoint: str, base_model: str, quantization: str = "int8") -> None:
    """One step; in a pipeline of your own it follows the training."""
    task = export_component(
        checkpoint=checkpoint,
        base_model=base_model,
        quantization=quantization,
        request_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
    )
    task.set_caching_options(enable_caching=False)  # Slipway's own store knows what was done before
    for name, value in ENVIRONMENT.items():
        task.set_env_variable(name, value)
    kubernetes.use_secret_as_volume(task, secret_name=TLS_SECRET, mount_path="/tls")
    kubernetes.add_pod_label(task, label_key="slipway.dev/client", label_value="true")


if __name__ == "__main__":
    compiler.Compiler().compile(export_pipeline, package_path="export.yaml")

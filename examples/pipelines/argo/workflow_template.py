"""An export as a WorkflowTemplate of Argo Workflows: ``python workflow_template.py > export.yaml`` writes what ``kubectl apply -f`` takes.

    argo submit --from workflowtemplate/slipway-export -p checkpoint=s3://training/run-17 -p base-model=hf://Qwen/Qwen3-0.6B

It only names the sources: workers import them, as far as SLIPWAY_IMPORT_FROM allows. Another workflow takes it as a step by
``templateRef: {name: slipway-export, template: export}``. The namespace of the workflow needs the Secret slipway-pipelines-tls; see
docs/kubernetes.md. Needs ``pip install 'hera[yaml]'``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hera.workflows import Container, Env, Parameter, Resources, RetryStrategy, SecretVolume, WorkflowTemplate
from hera.workflows import models as m

STEP = Path(__file__).parents[1] / "step.sh"
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
# A pod that never ran or was ended (137, 143), a coordinator that was away (7): the step continues its export. What is wrong (2), failed
# (3 to 6) or was cancelled by somebody (130) ends the workflow.
AGAIN = 'lastRetry.status == "Error" || asInt(lastRetry.exitCode) in [7, 137, 143]'


def template() -> WorkflowTemplate:
    """Return the template."""
    with WorkflowTemplate(
        name="slipway-export",
        entrypoint="export",
        arguments=[
            Parameter(name="checkpoint"),
            Parameter(name="base-model"),
            Parameter(name="formats", value="onnx:int8"),
        ],
        pod_metadata=m.Metadata(
            labels={"slipway.dev/client": "true"}
        ),  # the network policy lets these pods to the coordinator
        automount_service_account_token=True,  # Argo's own container reports the outcome of a step with it
        security_context=m.PodSecurityContext(
            run_as_non_root=True,
            run_as_user=10001,
            run_as_group=10001,
            fs_group=10001,
            seccomp_profile=m.SeccompProfile(type="RuntimeDefault"),
        ),
        volumes=[
            SecretVolume(name="tls", secret_name="slipway-pipelines-tls", default_mode=0o440),  # noqa: S106 - its name
            m.Volume(name="tmp", empty_dir=m.EmptyDirVolumeSource(size_limit=m.Quantity(root="64Mi"))),
        ],
    ) as made:
        step()
    return made


def step() -> Container:
    """Return the step: its parameters are words of a command, in which nothing is read by a shell."""
    return Container(
        name="export",
        inputs=[
            Parameter(name="checkpoint", value="{{workflow.parameters.checkpoint}}"),
            Parameter(name="base-model", value="{{workflow.parameters.base-model}}"),
            Parameter(name="formats", value="{{workflow.parameters.formats}}"),
            Parameter(
                name="request-id", value="{{workflow.uid}}"
            ),  # a second export of the same workflow needs one of its own
        ],
        outputs=[
            Parameter(name="export", value_from=m.ValueFrom(path="/tmp/export")),  # noqa: S108 - as above
            Parameter(name="digests", value_from=m.ValueFrom(path="/tmp/digests.json")),  # noqa: S108 - as above
        ],
        image="slipway-coordinator:0.1.0",  # has the command
        command=["sh", "-ec", SCRIPT, "step"],
        args=[
            "/tmp/export",  # noqa: S108 - as above
            "/tmp/digests.json",  # noqa: S108 - as above
            "--request-id={{inputs.parameters.request-id}}",
            "--checkpoint={{inputs.parameters.checkpoint}}",
            "--base-model={{inputs.parameters.base-model}}",
            "-f{{inputs.parameters.formats}}",
        ],
        env=[Env(name=name, value=value) for name, value in ENVIRONMENT.items()],
        retry_strategy=RetryStrategy(
            limit="10",
            retry_policy="Always",  # the expression alone decides
            expression=AGAIN,
            backoff=m.Backoff(duration="10s", factor=m.IntOrString(root="2"), max_duration="1h"),
        ),
        resources=Resources(
            cpu_request="100m",
            memory_request="256Mi",
            ephemeral_request="64Mi",
            cpu_limit="1",
            memory_limit="512Mi",
            ephemeral_limit="128Mi",
        ),
        security_context=m.SecurityContext(
            allow_privilege_escalation=False, read_only_root_filesystem=True, capabilities=m.Capabilities(drop=["ALL"])
        ),
        volume_mounts=[
            m.VolumeMount(name="tls", mount_path="/tls", read_only=True),
            m.VolumeMount(name="tmp", mount_path="/tmp"),  # noqa: S108 - as above
        ],
    )


if __name__ == "__main__":
    sys.stdout.write("# Made by workflow_template.py, which says what it does and needs.\n" + template().to_yaml())

"""An export on a cluster arrives, signed, in a bucket, a registry and MLflow; the other side's tools get it, and what they get is checked and runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipway.artifacts.digests import digest_bytes
from slipway.files.checksums import MANIFEST, write_checksums
from slipway.publishing.publication import PROOF, SIGNATURE
from slipway.publishing.release import prepare_release
from support.cluster.cluster import Cluster
from support.commands.cli import Done, slipway
from support.commands.delivered_folders import make_keys
from support.commands.usage_examples import usage_examples
from support.models import tiny_models
from support.servers.mlflow_server import MLFLOW, mlflow_server, needs_mlflow
from support.servers.postgres_server import PostgresServer
from support.servers.registry_server import RegistryServer, needs_registry, needs_skopeo, registry_server, skopeo
from support.servers.s3_server import BUCKET, S3Server

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800), needs_registry, needs_skopeo, needs_mlflow]  # fmt: skip
pytest.importorskip("model_signing", reason="the extra publish is not installed")
pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")

OUTPUTS = ("onnx", "onnx-int8", "pytorch")
PREFIX = "published/of-a-cluster"


@dataclass(frozen=True)
class Published:
    """An export that a cluster made and its client published.

    Attributes:
        folder: What was delivered.
        keys: The private and the public key.
        addresses: Where it was published, as the command prints it: bucket, registry, MLflow.
        registry: The registry.
        mlflow: Address of the MLflow server.
        s3: The server of the bucket.
        home: Home of the commands that check.
    """

    folder: Path
    keys: tuple[Path, Path]
    addresses: tuple[str, str, str]
    registry: RegistryServer
    mlflow: str
    s3: S3Server
    home: Path

    def verify(self, what: str | Path) -> Done:
        """Verify with the public key, as a reader does."""
        return slipway("verify", what, "--key", self.keys[1], "--json", home=self.home, **self.s3.environment())

    def refusal(self, what: str | Path) -> tuple[int, str, str]:
        """Return exit code, reason and message of what is refused."""
        done = self.verify(what)
        return done.code, done.json["reason"], done.json["error_message"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer, s3: S3Server) -> Iterator[Published]:
    root = tmp_path_factory.mktemp("published")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    keys = make_keys(root)
    (root / "cluster").mkdir()
    with (
        registry_server(root / "registry") as registry,
        mlflow_server(root / "mlflow") as mlflow,
        Cluster(root / "cluster", postgres, s3, tiny=False, workers=2, lease_seconds=20) as cluster,
    ):
        addresses = f"s3://{BUCKET}/{PREFIX},oci://{registry.host}/models/run:v1,mlflow:of a cluster"
        environment = cluster.environment("command") | {
            "SLIPWAY_SIGNING_KEY": str(keys[0]),
            "MLFLOW_TRACKING_URI": mlflow,
            "DOCKER_CONFIG": str(root / "docker"),
        }
        home = Path(environment.pop("SLIPWAY_HOME"))
        words = ["export", root / "run", "--base-model", root / "base", "--out", root / "out", "--json"]
        words += ["-f", "onnx:none+int8", "-f", "pytorch", "--set", f"output.destinations={addresses}"]
        words += ["--coordinator", cluster.service.address]
        done = slipway(*words, home=home, timeout=900, **environment)
        assert done.code == 0, done.err[-3000:] + cluster.logs()
        assert {name: each["status"] for name, each in done.json["formats"].items()} == dict.fromkeys(OUTPUTS, "passed")
        used = {
            attempt.worker
            for task in cluster.client.get_export(done.json["export_id"]).tasks
            for attempt in task.attempts
        }
        assert used
        bucket, oci, version = (each["address"] for each in done.json["published"])
        folder = Path(done.json["output_directory"])
        yield Published(folder, keys, (bucket, oci, version), registry, mlflow, s3, root / "reader")


def from_bucket(published: Published, target: Path) -> None:
    """Get every object below the prefix by the client that the server's makers offer."""
    client = published.s3.client()
    for each in client.list_objects(BUCKET, prefix=f"{PREFIX}/", recursive=True):
        client.fget_object(BUCKET, each.object_name, str(target / each.object_name.removeprefix(f"{PREFIX}/")))


def from_registry(published: Published, target: Path) -> None:
    """Get the index with all that it names by skopeo, and what is attached to it; put each layer where its annotation says."""
    name, _, digest = published.addresses[1].removeprefix("oci://").partition("@")
    attached = f"{name}:{digest.replace(':', '-')}"  # as clients agreed for registries that list no referrers
    for number, source in enumerate((f"{name}@{digest}", attached)):
        layout = target.with_name(f"layout-{number}")
        skopeo("copy", "--all", "--src-tls-verify=false", f"docker://{source}", f"oci:{layout}:v1")
        write_layers(layout, target)


def write_layers(layout: Path, target: Path) -> None:
    """Write the files of all artifacts of an index, which lies in a folder."""

    def read(digest: str) -> bytes:
        data = (layout / "blobs" / digest.replace(":", "/")).read_bytes()
        assert digest_bytes(data) == digest
        return data

    top = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    for entry in json.loads(read(top))["manifests"]:
        folder = target / entry["annotations"].get("slipway.output", "")
        for layer in json.loads(read(entry["digest"]))["layers"]:
            labels = layer["annotations"]
            path = folder / labels.get("org.cncf.model.filepath", labels["org.opencontainers.image.title"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(read(layer["digest"]))


def from_mlflow(published: Published, target: Path) -> None:
    """Get the version's files by MLflow's own command."""
    words = [MLFLOW, "artifacts", "download", "--artifact-uri", published.addresses[2], "--dst-path", target]
    environment = {"MLFLOW_TRACKING_URI": published.mlflow, "PATH": str(MLFLOW.parent), "HOME": str(target.parent)}
    subprocess.run(words, check=True, capture_output=True, env=environment | {"MLFLOW_DISABLE_TELEMETRY": "true"})


GET: dict[str, Callable[[Published, Path], None]] = {
    "bucket": from_bucket,
    "registry": from_registry,
    "mlflow": from_mlflow,
}


@pytest.fixture(params=sorted(GET))
def got(request: pytest.FixtureRequest, published: Published, tmp_path: Path) -> Path:
    """A copy of the folder, as the tools of the other side bring it."""
    target = tmp_path / "got"
    target.mkdir()
    GET[request.param](published, target)
    return target


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_the_other_side_gets_is_verified_and_runs(published: Published, got: Path) -> None:
    assert files(got) == files(published.folder)
    done = published.verify(got)
    assert (done.code, done.json["verdict"], len(done.json["signed_by"])) == (0, "passed", 64), done.err
    words = ["verify", "key", "--signature", got / SIGNATURE, "--public_key", published.keys[1], got]
    theirs = subprocess.run([sys.executable, "-P", "-m", "model_signing", *words], capture_output=True, text=True)
    assert theirs.returncode == 0, theirs.stdout + theirs.stderr
    examples = usage_examples((got / "README.md").read_text())
    assert set(OUTPUTS) <= examples.keys()
    for name in ("onnx-int8", "pytorch"):
        ran = subprocess.run(
            [sys.executable, "-P", "-c", examples[name]], cwd=got, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip()


def test_a_tampered_byte_is_refused(published: Published, got: Path) -> None:
    path = got / "onnx-int8" / "model.onnx"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, reason, message = published.refusal(got)
    assert (code, reason) == (7, "ARTIFACT_CORRUPT")
    assert "onnx-int8/model.onnx" in message


def test_a_forged_verdict_is_refused(published: Published, got: Path) -> None:
    """Whoever may write there makes report, checksums, statement and bill of materials anew to fit; the key is what is missing."""
    report = json.loads((got / "report.json").read_text())
    report["validation"]["outputs"][0]["to_reference"]["mean_kl"] = 1e-9
    (got / "report.json").write_text(json.dumps(report))
    code, reason, message = published.refusal(got)
    assert (code, reason) == (7, "ARTIFACT_CORRUPT")
    assert "report.json" in message
    signature = (got / SIGNATURE).read_bytes()
    for name in (MANIFEST, *PROOF):
        (got / name).unlink()
    write_checksums(got, known={})
    prepare_release(got)
    (got / SIGNATURE).write_bytes(signature)
    code, reason, message = published.refusal(got)
    assert (code, reason) == (4, "SIGNED_CONTENT_CHANGED")
    assert "report.json" in message
    prepare_release(got, key=make_keys(got.parent, "forger")[0])
    assert published.refusal(got)[:2] == (4, "SIGNATURE_INVALID")


def test_a_registry_that_lost_a_layer_or_changed_a_byte_is_refused(published: Published) -> None:
    address = published.addresses[1]
    assert published.verify(address).code == 0
    weights = published.registry.blob(digest_bytes((published.folder / "onnx-int8" / "model.onnx").read_bytes()))
    weights.rename(weights.with_name("away"))
    code, reason, message = published.refusal(address)
    weights.with_name("away").rename(weights)
    assert (code, reason) == (3, "ARTIFACT_NOT_FOUND")
    assert "onnx-int8/model.onnx" in message
    report = published.registry.blob(digest_bytes((published.folder / "report.json").read_bytes()))
    kept = shutil.copy(report, report.with_name("kept"))
    report.write_bytes(report.read_bytes().replace(b"passed", b"PASSED"))
    code, reason, message = published.refusal(address)
    Path(kept).replace(report)
    assert (code, reason) == (7, "ARTIFACT_CORRUPT")
    assert "report.json" in message
    assert published.verify(address).code == 0

"""Calls of a coordinator as an attacker makes them: any method, any bytes, any principal, over one connection."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from slipway.artifacts import Manifest, ManifestFile
from slipway.artifacts.digests import digest_bytes
from slipway.artifacts.manifest import media_type
from slipway.errors import Failure
from slipway.reasons import REASONS
from slipway.rpc.call_ends import STATUS_KEY
from slipway.rpc.messages import configuration_message
from slipway.rpc.values import failure_of_bytes
from slipway_protos.v1 import artifact_pb2, worker_pb2
from slipway_protos.v1 import export_pb2 as pb
from support.coordinators.artifact_places import PEOPLE, Place
from support.coordinators.harness import CONFIGURATION, DIGEST
from support.harness.unhurried import unhurried

EXPORTS, ARTIFACTS, WORKERS = (f"/slipway.v1.{name}Service/" for name in ("Export", "Artifact", "Worker"))
PEOPLE_HERE = PEOPLE | {
    "worker": "role: worker",
    "expired": "role: operator, projects: ['*'], expires: 2001-01-01",
}
OURS = Manifest.of([ManifestFile("ours", 4, digest_bytes(b"ours"), media_type("ours"))]).digest
SECONDS = 3.0
SECRET = "hunter2-of-somebody"
Wire = bytes | Message


class Attacker:
    """Calls any method with any bytes, as any principal."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._channel = grpc.insecure_channel(place.address, options=[("grpc.max_send_message_length", 64 << 20)])
        with place.client_of("submitter") as client:
            (place.home / "ours").write_text("ours")
            assert client.push_artifact({"ours": place.home / "ours"}) == OURS
            sources = {"base": OURS, "adapter": OURS}
            for name in ("ours", "ended"):
                client.create_export(CONFIGURATION, sources=sources, export_id=name)
            client.cancel_export("ended")
        with place.client_of("neighbour") as client:
            (place.home / "theirs").write_text("theirs")
            self.theirs = client.push_artifact({"theirs": place.home / "theirs"})

    def close(self) -> None:
        self._channel.close()

    def call(self, method: str, *sent: Wire, by: str = "submitter", metadata: Iterable[tuple[str, str]] = ()) -> str:
        """Return the reason of the refusal, empty without one; check that it is typed and comes soon."""
        failure = self.failure(method, *sent, by=by, metadata=metadata)
        return "" if failure is None else failure.reason

    def failure(
        self, method: str, *sent: Wire | Iterator[Wire], by: str = "submitter", metadata: Iterable[tuple[str, str]] = ()
    ) -> Failure | None:
        """Return the failure of a call; None if it has none."""
        shown = [("authorization", f"Bearer {self.place.tokens.get(by, by)}")] if by else []
        requests = (part for each in sent for part in ([each] if isinstance(each, bytes | Message) else each))
        stream = self._channel.stream_stream(method)
        began = time.monotonic()
        try:
            answers = stream(map(_bytes, requests), metadata=(*shown, *metadata), timeout=60)
            next(answers, None)
            answers.cancel()
            failure = None
        except grpc.RpcError as error:
            status = [value for key, value in error.trailing_metadata() or () if key == STATUS_KEY]
            assert status, f"{error.code()}: {error.details()}"
            failure = failure_of_bytes(status[0])
            assert failure.reason in REASONS
            assert failure.reason != "INTERNAL", failure
            assert failure.message
        took = time.monotonic() - began
        assert took < SECONDS or took < unhurried(SECONDS), f"{took:.1f} s"
        return failure

    def is_served(self) -> bool:
        with self.place.client_of("submitter") as client:
            return str(client.get_export("ours").name) == "projects/red/exports/ours"


def _bytes(sent: Wire) -> bytes:
    return sent if isinstance(sent, bytes) else sent.SerializeToString()


def field(message: Any, name: str, content: bytes = b"") -> bytes:
    """One length-delimited field on the wire, with any bytes."""
    number, size, head = message.DESCRIPTOR.fields_by_name[name].number, len(content), bytearray()
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *head, size]) + content


def export(**changes: Any) -> pb.CreateExportRequest:
    fields = {
        "parent": "projects/red",
        "configuration": configuration_message(CONFIGURATION),
        "sources": {"base": OURS, "adapter": OURS},
        "validate_only": True,
    }
    return pb.CreateExportRequest(**(fields | changes))


def report(**changes: Any) -> worker_pb2.SynchronizeRequest:
    return worker_pb2.SynchronizeRequest(**({"worker_id": "w", "stages": ["none"]} | changes))


def done(**changes: Any) -> worker_pb2.CompleteTaskRequest:
    fields = {"worker_id": "w", "task": "projects/red/exports/ours:merge:1", "lease_epoch": 1}
    output = worker_pb2.TaskOutput(outputs={"pytorch": DIGEST})
    return worker_pb2.CompleteTaskRequest(**(fields | {"output": output} | changes))


def blob(**changes: Any) -> artifact_pb2.WriteBlobRequest:
    fields = {"parent": "projects/red", "digest": digest_bytes(b"data"), "size_bytes": 4}
    return artifact_pb2.WriteBlobRequest(**(fields | changes))

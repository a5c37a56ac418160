"""The client repeats an upload that the coordinator refuses for a while, whatever time the coordinator names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from slipway.client import Client
from slipway.errors import Failure
from slipway.rpc.call_ends import STATUS_KEY, call_status
from slipway.rpc.values import RETRY_AFTER
from slipway_protos.v1 import artifact_pb2 as pb
from slipway_protos.v1 import artifact_pb2_grpc


class Full(artifact_pb2_grpc.ArtifactServiceServicer):
    """A service that refuses the first upload and names any time for the next attempt."""

    def __init__(self, retry_after: str) -> None:
        self._retry_after = retry_after
        self.uploads = 0

    def CreateArtifact(  # noqa: N802
        self, request: pb.CreateArtifactRequest, context: grpc.ServicerContext
    ) -> pb.CreateArtifactResponse:
        missing = [file.digest for file in request.files] if self.uploads < 2 else []
        return pb.CreateArtifactResponse(digest="sha256:0", missing=missing)

    def GetUpload(  # noqa: N802
        self, request: pb.GetUploadRequest, context: grpc.ServicerContext
    ) -> pb.GetUploadResponse:
        return pb.GetUploadResponse()

    def WriteBlob(  # noqa: N802
        self, request_iterator: Iterator[pb.WriteBlobRequest], context: grpc.ServicerContext
    ) -> pb.WriteBlobResponse:
        self.uploads += 1
        if self.uploads == 1:
            about = {RETRY_AFTER: self._retry_after}
            code, details, status = call_status(Failure("UPLOADS_FULL", "wait", about=about))
            context.set_trailing_metadata(((STATUS_KEY, status),))
            context.abort(code, details)
        list(request_iterator)
        return pb.WriteBlobResponse()


@pytest.mark.parametrize("retry_after", ["soon", "nan", "inf", "-1", "1e300", "0.2"])
def test_a_refused_upload_is_sent_again(tmp_path: Path, retry_after: str) -> None:
    (tmp_path / "file").write_text("content")
    server, service = grpc.server(futures.ThreadPoolExecutor(2)), Full(retry_after)
    artifact_pb2_grpc.add_ArtifactServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        began = time.monotonic()
        with Client(f"127.0.0.1:{port}") as client:
            assert client.push_artifact({"file": tmp_path / "file"}) == "sha256:0"
        assert (service.uploads, time.monotonic() - began < 30) == (2, True)
    finally:
        server.stop(None)

"""The S3 store while its server refuses, is away, or breaks off in the middle of a transfer."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from slipway.artifacts import ActionResult
from slipway.artifacts.s3 import transfer
from slipway.artifacts.s3.blobs import S3Blobs
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.store import S3Store
from slipway.errors import ArtifactError
from support.commands.cli import start
from support.servers.s3_server import BUCKET, FaultyProxy, S3Server, s3_server
from support.servers.stored_files import digest_of, random_file, through

PART = 5 << 20  # the smallest the protocol allows


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multipart transfers of files that are small enough for a test."""
    monkeypatch.setattr(transfer, "PART_BYTES", PART)


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
def test_a_fifth_of_calls_refused_and_answers_cut_short(s3: S3Server, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_file(folder / "weights", 2 * PART + 3)
    for number in range(8):
        random_file(folder / f"shard-{number}", 3000)
    expected = {path.name: digest_of(path) for path in folder.iterdir()}
    with FaultyProxy(s3.endpoint, refuse=0.2, truncate=0.4, seed=7) as proxy:
        store = through(proxy, s3)
        digest = store.put(folder)
        assert store.exists(digest)
        store.record_action("0" * 64, ActionResult({"out": digest}))
        assert store.action("0" * 64) == ActionResult({"out": digest})
        out = store.fetch(digest, tmp_path / "out")
        assert {path.name: digest_of(path) for path in out.iterdir()} == expected
        assert proxy.refused > 5
        assert proxy.truncated > 2


def test_an_answer_that_is_less_than_all_takes_nothing_from_the_bucket(
    s3: S3Server, bucket: S3Bucket, tmp_path: Path
) -> None:
    """Neither a manifest, nor what says that there is none."""
    store = S3Store(bucket)
    digest = store.put_files({"weights": random_file(tmp_path / "weights", 1000)})
    with FaultyProxy(s3.endpoint) as proxy:
        behind = S3Store(S3Bucket(s3.options(endpoint=proxy.endpoint), BUCKET, prefix=bucket.prefix))
        proxy.shorten = 1
        assert behind.manifest(digest) == store.manifest(digest)
        proxy.shorten = 1
        assert not behind.exists("sha256:" + "0" * 64)
        assert proxy.shorten == 0


def test_a_file_is_read_though_answers_break_off_for_a_while_before_their_first_byte(
    s3: S3Server, bucket: S3Bucket, tmp_path: Path
) -> None:
    digest = S3Store(bucket).put_files({"weights": random_file(tmp_path / "weights", 3000)})

    def read(patience: float, mute: float) -> bytes:
        with FaultyProxy(s3.endpoint) as proxy:
            options = s3.options(endpoint=proxy.endpoint)
            store = S3Store(S3Bucket(options, BUCKET, prefix=bucket.prefix, patience_seconds=patience))
            (file,) = store.manifest(digest).files
            proxy.mute_until = time.monotonic() + mute
            try:
                return b"".join(S3Blobs(store).read(file, digest))
            finally:
                assert proxy.truncated < 20  # with pauses between the attempts

    assert read(patience=60, mute=1.2) == (tmp_path / "weights").read_bytes()
    with pytest.raises(ArtifactError, match="reading") as raised:
        read(patience=0.3, mute=60)
    assert (raised.value.reason, raised.value.retryable) == ("STORE_UNAVAILABLE", True)


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_service_that_stays_away_is_unavailable(s3: S3Server, tmp_path: Path, status: int) -> None:
    with FaultyProxy(s3.endpoint, refuse=1.0, status=status) as proxy:
        store = through(proxy, s3, patience=0.5)
        with pytest.raises(ArtifactError) as raised:
            store.put_files({"x": random_file(tmp_path / "x", 10)})
    assert (raised.value.reason, raised.value.retryable) == ("STORE_UNAVAILABLE", True)
    with pytest.raises(ArtifactError) as raised:  # nobody listens there any more
        store.exists("sha256:" + "0" * 64)
    assert raised.value.reason == "STORE_UNAVAILABLE"


def test_waiting_for_a_service_can_be_stopped(s3: S3Server, tmp_path: Path) -> None:
    stop = threading.Event()

    def check(_: int) -> None:
        if stop.is_set():
            raise KeyError("cancelled")

    with FaultyProxy(s3.endpoint, refuse=1.0) as proxy:
        store = through(proxy, s3, patience=600)
        threading.Timer(0.5, stop.set).start()
        begin = time.monotonic()
        file = random_file(tmp_path / "x", 10)
        with pytest.raises(KeyError):
            store.put_files({"x": file}, on_bytes=check)
        assert time.monotonic() - begin < 60  # not 600


def test_ctrl_c_does_not_wait_for_a_service_that_is_away(s3: S3Server, tmp_path: Path) -> None:
    for number in range(20):
        random_file(tmp_path / "folder" / str(number), 10)
    with FaultyProxy(s3.endpoint, refuse=1.0) as proxy:
        away = {**s3.environment(), "AWS_ENDPOINT_URL": proxy.endpoint, "SLIPWAY_STORE": f"s3://{BUCKET}/away"}
        process = start(["push", tmp_path / "folder"], tmp_path / "home", **away)
        assert process.stderr is not None
        assert "push: started" in process.stderr.readline()
        assert "does not answer" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)  # calls are repeated for 60 seconds
    assert process.returncode == 130


@pytest.mark.cluster
def test_transfers_outlast_ten_seconds_without_a_server(tmp_path: Path) -> None:
    with s3_server(tmp_path / "server") as server:
        store = S3Store(S3Bucket(server.options(), BUCKET, prefix="p"))
        before = random_file(tmp_path / "before", 40 << 20)
        held = store.put_files({"weights": before})
        results: dict[str, object] = {}
        after = random_file(tmp_path / "after", 200 << 20)
        sent: list[int] = []

        def put() -> None:
            results["put"] = store.put_files({"weights": after}, on_bytes=sent.append)

        def fetch() -> None:
            results["fetch"] = digest_of(store.fetch(held, tmp_path / "out") / "weights")

        threads = [threading.Thread(target=work) for work in (put, fetch)]
        threads[0].start()
        while sum(sent) < 20 << 20:  # in the middle of the upload
            time.sleep(0.001)
        server.stop()
        assert "put" not in results
        threads[1].start()
        time.sleep(10)
        server.start()
        for thread in threads:
            thread.join(200)
        assert results["fetch"] == digest_of(before)
        assert digest_of(store.fetch(str(results["put"]), tmp_path / "back") / "weights") == digest_of(
            tmp_path / "after"
        )

"""What is counted of a bucket and of the node's cache, with a real server behind a proxy that refuses and cuts short."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import pytest

from slipway.artifacts import LocalStore
from slipway.artifacts.cached import CachedStore
from slipway.artifacts.opening import cache_size
from slipway.artifacts.s3 import transfer
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.store import S3Store
from slipway.errors import ArtifactError
from slipway.observability import metrics
from slipway.settings import Settings
from support.servers.metrics_page import page
from support.servers.s3_server import BUCKET, FaultyProxy, S3Server

PART = 5 << 20  # the smallest the protocol allows


def through(s3: S3Server, endpoint: str = "", *, patience: float = 120) -> S3Store:
    options = s3.options(endpoint=endpoint or s3.endpoint)
    return S3Store(S3Bucket(options, BUCKET, prefix=uuid.uuid4().hex, patience_seconds=patience))


def a_file(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    return path


def requests(port: int, **labels: str) -> float:
    return total(port, "slipway_store_requests_total", **labels)


def total(port: int, name: str, **labels: str) -> float:
    found = ((dict(key), value) for (sample, key), value in page(port).items() if sample == name)
    return sum(value for key, value in found if labels.items() <= key.items())


@pytest.mark.slow
def test_every_refusal_is_counted_as_a_retry(s3: S3Server, tmp_path: Path) -> None:
    with FaultyProxy(s3.endpoint, refuse=0.3, seed=1) as proxy, metrics.serving("127.0.0.1:0") as port:
        store = through(s3, proxy.endpoint)
        files = {f"f{number}": a_file(tmp_path / f"f{number}", 2000) for number in range(6)}
        digest = store.put_files(files)
        store.fetch(digest, tmp_path / "out")
        assert proxy.refused > 0
        assert requests(port, outcome="retried") == proxy.refused
        assert requests(port, outcome="ok") + requests(port, outcome="missing") == requests(port) - proxy.refused
        assert requests(port, operation="writing", outcome="ok") == 7  # six blobs and the manifest
        assert requests(port, operation="downloading", outcome="ok") == 6
        assert requests(port, outcome="failed") == 0


@pytest.mark.slow
def test_what_is_missing_or_fails_for_good(s3: S3Server, tmp_path: Path) -> None:
    with metrics.serving("127.0.0.1:0") as port:
        with pytest.raises(ArtifactError, match="not in the store"):
            through(s3).fetch(f"sha256:{'0' * 64}", tmp_path / "out")
        assert (requests(port, operation="reading", outcome="missing"), requests(port)) == (1, 1)
        with FaultyProxy(s3.endpoint, refuse=1.0) as proxy, pytest.raises(ArtifactError, match="answers"):
            through(s3, proxy.endpoint, patience=3).bucket.get("anything")
        assert requests(port, outcome="failed") == 1
        assert requests(port, outcome="retried") == proxy.refused - 1 > 0


def test_bytes_both_ways_in_parts_and_after_answers_cut_short(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PART_BYTES", PART)
    size = 2 * PART + 17
    with metrics.serving("127.0.0.1:0") as port:
        store = through(s3)
        digest = store.put_files({"weights": a_file(tmp_path / "weights", size)})
        manifest = len(store.manifest(digest).to_bytes())
        assert total(port, "slipway_store_bytes_total", direction="sent") == size + manifest
        assert total(port, "slipway_store_bytes_total", direction="received") == manifest
        with FaultyProxy(s3.endpoint, truncate=0.4, seed=3) as proxy:
            bucket = S3Bucket(s3.options(endpoint=proxy.endpoint), BUCKET, prefix=store.bucket.prefix)
            S3Store(bucket).fetch(digest, tmp_path / "out")
            assert proxy.truncated > 0
        # Each goes on where the last answer broke off: nothing comes twice.
        assert total(port, "slipway_store_bytes_total", direction="received") == size + 2 * manifest
        assert requests(port, operation="downloading", outcome="retried") == proxy.truncated


def test_the_node_s_cache(s3: S3Server, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", scratch=tmp_path / "scratch", store=f"s3://{BUCKET}/anything")
    files, sizes = "slipway_node_cache_files_total", "slipway_node_cache_file_bytes_total"
    with metrics.serving("127.0.0.1:0") as port, metrics.reading(lambda: cache_size(settings)):
        remote = through(s3)
        digests = []
        for number in range(3):
            own = a_file(tmp_path / f"own{number}", 1000)
            digests.append(remote.put_files({"own": own, "shared": a_file(tmp_path / "shared", 100)}))
        cache = CachedStore(remote, LocalStore(settings.cache_path), max_bytes=2500)
        cache.fetch(digests[0], tmp_path / "a")
        assert (total(port, files, result="miss"), total(port, files, result="hit")) == (2, 0)
        cache.fetch(digests[0], tmp_path / "b")
        assert (total(port, files, result="miss"), total(port, files, result="hit")) == (2, 2)
        assert total(port, sizes, result="hit") == total(port, sizes, result="miss") == 1100
        assert total(port, "slipway_node_cache_bytes") == 1100
        for number, digest in enumerate(digests[1:]):
            time.sleep(0.02)  # the order of use is in the files' times
            cache.fetch(digest, tmp_path / f"c{number}")
        assert total(port, "slipway_node_cache_evictions_total") == 1
        assert total(port, "slipway_node_cache_evicted_bytes_total") == 1100
        assert total(port, "slipway_node_cache_bytes") == cache.local.size_bytes() == 2200

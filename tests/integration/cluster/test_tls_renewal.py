"""A TLS server under many connections, half of them broken, while its certificate is renewed again and again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.servers.certificates import Authority
from support.servers.handshakes import AT_ONCE, connect, tls_process

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

HANDSHAKES = int(os.environ.get("CLUSTER_TLS_HANDSHAKES", "100000"))
RENEWALS = 10


def test_renewals_under_load_end_no_server(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    with tls_process(authority) as (process, port):
        load = connect(port, authority, HANDSHAKES, renewals=RENEWALS)
        assert process.poll() is None, f"it ended with {process.returncode}: {load}"
    assert load.complete + load.broken + load.reset >= HANDSHAKES * 0.999, load
    assert load.reset <= 2 * AT_ONCE * RENEWALS, load  # those under way at the moment of a renewal
    assert len(load.certificates) > RENEWALS / 2, load

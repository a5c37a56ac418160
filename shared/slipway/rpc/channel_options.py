"""Options of every gRPC channel that Slipway opens."""

from __future__ import annotations

from collections.abc import Sequence

MAX_MESSAGE_BYTES = 64 << 20
"""Largest response that a client accepts: a page of exports."""

# A server that is pinged more often than its minimum (see slipway.rpc.serving) ends the connection: GOAWAY too_many_pings.
CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # Despite its name, the time that each attempt to connect may take, with its TLS handshake: of three round trips, on a busy machine.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Without it, channels of one process to one address share a connection, and closing one channel ends the others' calls.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

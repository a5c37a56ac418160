"""Options of every gRPC channel here."""

from __future__ import annotations

from collections.abc import Sequence

MAX_MESSAGE_BYTES = 64 << 20
"""Largest answer a client takes: a page of exports."""

# A server that is pinged more often than its minimum (see slipway.rpc.serving) ends the connection: GOAWAY too_many_pings.
CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Channels of one process to the same address are kept apart: closing one must not end the others' calls.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

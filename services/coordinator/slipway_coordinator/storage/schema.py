"""Tables of the coordinator as this program uses them; :mod:`slipway_coordinator.storage.migrations` brings a database to them."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

exports = sa.Table(
    "slipway_exports",
    metadata,
    sa.Column("name", sa.String(300), primary_key=True),
    sa.Column("project", sa.String(100), nullable=False, index=True),
    sa.Column("create_time", sa.Double, nullable=False),
    sa.Column("end_time", sa.Double),
    sa.Column("state", sa.String(20), nullable=False, server_default="queued"),
    sa.Column("ended", sa.Boolean, nullable=False, index=True),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("request_id", sa.String(64)),
    sa.Column("creator", sa.String(100), nullable=False, server_default=""),
    sa.Column("sequence_limit", sa.BigInteger, nullable=False),
    sa.Column("run", sa.Integer, nullable=False, server_default="1"),
    sa.Column("record", sa.Text, nullable=False),
    sa.Column("summary", sa.Text, nullable=False, server_default="{}"),
    sa.Column("shape", sa.String(16), nullable=False, server_default=""),  # of the record, as its writer knew it
    sa.Index("ux_slipway_exports_request", "project", "request_id", unique=True),
    sa.Index("ix_slipway_exports_page", "project", "create_time", "name"),
    sa.Index("ix_slipway_exports_newest", sa.text("create_time DESC"), "name"),
)

labels = sa.Table(
    "slipway_labels",
    metadata,
    sa.Column("export", sa.String(300), primary_key=True),
    sa.Column("name", sa.String(100), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
    sa.Index("ix_slipway_labels_value", "name", "value"),
)

leases = sa.Table(
    "slipway_leases",
    metadata,
    sa.Column("task", sa.String(500), primary_key=True),
    sa.Column("export", sa.String(300), nullable=False, index=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("worker", sa.String(200), nullable=False),
    sa.Column("state", sa.String(20), nullable=False),
    sa.Column("gpus", sa.Double, nullable=False, server_default="0"),  # whose time is not in slipway_gpu_seconds
    sa.Column("since", sa.Double, nullable=False, server_default="0"),  # this time
    sa.Index("ix_slipway_leases_gpus", "gpus", sqlite_where=sa.text("gpus > 0"), postgresql_where=sa.text("gpus > 0")),
)

epochs = sa.Table(
    "slipway_epochs",
    metadata,
    sa.Column("highest", sa.BigInteger, nullable=False),  # one row: the highest epoch of leases that are forgotten
    sa.Column("alive_time", sa.Double, nullable=False, server_default="0"),  # when a coordinator was last known to run
)

artifacts = sa.Table(
    "slipway_artifacts",
    metadata,
    sa.Column("project", sa.String(100), primary_key=True),
    sa.Column("digest", sa.String(80), primary_key=True, index=True),
    sa.Column("export", sa.String(300), primary_key=True, index=True),  # empty for artifacts made without an export
    sa.Column("create_time", sa.Double, nullable=False),
)

measurements = sa.Table(
    "slipway_measurements",
    metadata,
    sa.Column("artifact", sa.String(80), primary_key=True),
    sa.Column("state", sa.String(20), nullable=False),
    sa.Index(
        "ix_slipway_measurements_unknown",
        "artifact",
        sqlite_where=sa.text("state = 'unknown'"),
        postgresql_where=sa.text("state = 'unknown'"),
    ),
)

contents = sa.Table(
    "slipway_contents",
    metadata,
    sa.Column("artifact", sa.String(80), primary_key=True),
    sa.Column("digest", sa.String(80), primary_key=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
)

stored = sa.Table(
    "slipway_stored",
    metadata,
    sa.Column("project", sa.String(100), primary_key=True),
    sa.Column("digest", sa.String(80), primary_key=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("artifacts", sa.Integer, nullable=False),  # of the project that have this content
)

usage = sa.Table(
    "slipway_usage",
    metadata,
    sa.Column("project", sa.String(100), primary_key=True),
    sa.Column("stored_bytes", sa.BigInteger, nullable=False),
)

gpu_seconds = sa.Table(
    "slipway_gpu_seconds",
    metadata,
    sa.Column("project", sa.String(100), primary_key=True),
    sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),  # since the epoch
    sa.Column("seconds", sa.Double, nullable=False),
)

blobs = sa.Table(
    "slipway_blobs",
    metadata,
    sa.Column("project", sa.String(100), primary_key=True),
    sa.Column("digest", sa.String(80), primary_key=True),
    sa.Column("create_time", sa.Double, nullable=False),
    sa.Column(
        "size_bytes", sa.BigInteger, nullable=False, server_default="0"
    ),  # 0 once an artifact has it, which counts it
    sa.Index("ix_slipway_blobs_time", "create_time"),
    sa.Index(
        "ix_slipway_blobs_sizes",
        "project",
        sqlite_where=sa.text("size_bytes > 0"),
        postgresql_where=sa.text("size_bytes > 0"),
    ),
)

events = sa.Table(
    "slipway_events",
    metadata,
    sa.Column("export", sa.String(300), primary_key=True),
    sa.Column("run", sa.Integer, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("key", sa.String(600), nullable=False, unique=True),
    sa.Column("event", sa.Text, nullable=False),
)

changes = sa.Table(
    "slipway_changes",
    metadata,
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("time", sa.Double, nullable=False),
    sa.Column("project", sa.String(100), nullable=False),
    sa.Column("change", sa.Text, nullable=False),
    sa.Index("ix_slipway_changes_project", "project", "sequence"),
)

deliveries = sa.Table(
    "slipway_deliveries",
    metadata,
    sa.Column("receiver", sa.String(100), primary_key=True),
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("type", sa.String(60), nullable=False),
    sa.Column("export", sa.String(300), nullable=False),
    sa.Column("export_create_time", sa.Double, nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("create_time", sa.Double, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("due_time", sa.Double, nullable=False),
    sa.Column("is_next", sa.Boolean, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Index("ix_slipway_deliveries_order", "receiver", "export", "export_create_time", "revision"),
    sa.Index("ix_slipway_deliveries_due", "receiver", "is_next", "due_time"),
    sa.Index("ix_slipway_deliveries_tried", "receiver", "is_next", "attempts", "due_time"),
    sa.Index("ix_slipway_deliveries_age", "receiver", "create_time", "attempts"),
)

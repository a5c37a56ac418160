"""The coordinator's database: tables, migrations, events and leases."""

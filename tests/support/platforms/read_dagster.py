"""Print what the last materialization of the example's asset says, or the last failure of a run, as JSON."""

from __future__ import annotations

import json

import dagster as dg


def main() -> None:
    instance = dg.DagsterInstance.get()
    found = {}
    event = instance.get_latest_materialization_event(dg.AssetKey("exported_model"))
    if event is not None and event.asset_materialization is not None:
        made = event.asset_materialization
        values = {name: value.value for name, value in made.metadata.items() if name != "outputs"}
        rows = [record.data for record in made.metadata["outputs"].records] if "outputs" in made.metadata else []
        found = {"values": values, "rows": rows, "version": (made.tags or {}).get("dagster/data_version")}
    found["runs"] = [run.status.value for run in instance.get_runs()]
    print("read", json.dumps(found))


if __name__ == "__main__":
    main()

"""Carries out the cluster's exports in one process and prints their outputs: what a disturbed run is compared with."""

from __future__ import annotations

import json
import os
import sys

from cluster import CONFIGURATION
from slipway.artifacts import LocalStore
from slipway.embedded import Embedded
from slipway.settings import Settings


def main() -> None:
    settings = Settings.from_environment(os.environ)
    store = LocalStore(settings.store_path)
    found = {}
    for text in sys.argv[1:]:
        source = settings.home / f"base-{text}"
        source.write_text(text)
        digest = store.put_files({"text": source})
        sources = {"base": digest, "adapter": digest}
        with Embedded(settings, text) as embedded:
            name = embedded.client.create_export(CONFIGURATION, sources=sources, export_id=text).name
            export = list(embedded.client.watch_export(name))[-1].export
            found[text] = dict(export.outputs)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Run one tiny export in this process on the engine that ``SLIPWAY_ENGINE`` names: ``python on_engine.py TEXT``.

It prints what a watcher sees, one JSON object a line; the last one is the result, as of :mod:`support.cluster.reference`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from slipway.artifacts import LocalStore
from slipway.embedded.coordinator import Embedded
from slipway.errors import ModelExportError
from slipway.settings import Settings
from support.cluster.cluster import CONFIGURATION
from support.cluster.reference import Undisturbed


def main(text: str) -> None:
    settings = Settings.from_environment(os.environ)
    store = LocalStore(Path(settings.store) if settings.store else settings.store_path)
    source = settings.home / f"base-{text}"
    source.write_text(text)
    digest = store.put_files({"text": source})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Embedded(settings, text) as embedded:
            name = embedded.client.create_export(
                CONFIGURATION, sources={"base": digest, "adapter": digest}, export_id=text
            ).name
            say(started=embedded.client.address)
            for event in embedded.client.watch_export(name):
                if event.WhichOneof("event") == "log":
                    say(level=event.log.level, line=event.log.message)
            export = embedded.client.get_export(name)
            tasks = {task.id: dict(task.outputs) for task in export.tasks}
            attempts = {task.id: [each.error.message for each in task.attempts] for task in export.tasks}
            say(result=asdict(Undisturbed(digest, dict(export.outputs), tasks)), attempts=attempts)
    except ModelExportError as error:
        say(reason=error.reason, message=str(error))


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

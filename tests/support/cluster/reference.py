"""Run the cluster's exports undisturbed in one process, for comparison with a disturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from slipway.artifacts import LocalStore
from slipway.embedded.coordinator import Embedded
from slipway.settings import Settings
from support import TINY_STAGES
from support.cluster.cluster import CONFIGURATION


@dataclass(frozen=True)
class Undisturbed:
    """The results of an export.

    Attributes:
        source: Digest of its source.
        outputs: Digest by format.
        tasks: Digest of each output of each task.
    """

    source: str
    outputs: dict[str, str]
    tasks: dict[str, dict[str, str]]

    @property
    def artifacts(self) -> set[str]:
        """Return the digests of all its artifacts in the store."""
        return {self.source, *(digest for outputs in self.tasks.values() for digest in outputs.values())}


def reference(folder: Path, texts: list[str]) -> dict[str, Undisturbed]:
    """Run the exports of these texts in one separate process."""
    folder.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TINY_STAGES), os.environ["PYTHONPATH"]]),
        "SLIPWAY_TEST_STAGES": str(folder),
        "SLIPWAY_HOME": str(folder),
    }
    command = [sys.executable, __file__, *texts]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {text: Undisturbed(**found) for text, found in json.loads(done.stdout).items()}


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
            tasks = {task.id: dict(task.outputs) for task in export.tasks}
            found[text] = asdict(Undisturbed(digest, dict(export.outputs), tasks))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

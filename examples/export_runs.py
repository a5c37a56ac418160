"""Export several training runs, one after the other: ``python examples/export_runs.py RUN [RUN …]``.

A run that fails is named with its remedy, and the others go on; the same command again continues what was interrupted. Settings come from
``EXPORT_*`` and ``SLIPWAY_*`` variables, as for the command.
"""

from __future__ import annotations

import asyncio
import sys

import slipway

told: set[str] = set()


def tell(progress: slipway.ExportProgress) -> None:
    """Print how far an export is, where its tasks have a new state."""
    states = ", ".join(f"{task.task} {task.state}" for task in progress.tasks)
    line = f"{progress.title}: {states}"
    if progress.tasks and line not in told:
        told.add(line)
        print(line, file=sys.stderr)


async def export(run: str) -> bool:
    """Export one run; return whether it succeeded."""
    try:
        (await slipway.plan_async(run)).require()  # says at once what would fail after hours
        result = await slipway.export_async(run, progress=tell)
    except slipway.ModelExportError as error:
        print(f"{run}: {error.reason}: {error}", file=sys.stderr)
        return False
    print(result)
    return result.success


async def main(runs: list[str]) -> int:
    """Export all runs, which take turns; return 0 if all succeeded."""
    return int(not all(await asyncio.gather(*map(export, runs))))


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(sys.argv[1:])))

"""The command line. Each command imports its heavy modules itself."""

import gc

_OBJECTS_BETWEEN_COLLECTIONS = 20_000
"""With Python's 700, a command that ends at once spends one second in twenty on collections that find nothing, because modules stay."""


def main() -> None:
    """Run the ``slipway`` command and end the process with its exit code."""
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    from slipway.cli.boundary import run

    run()

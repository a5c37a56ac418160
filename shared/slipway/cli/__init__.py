"""The command line. Each command imports its heavy modules itself."""


def main() -> None:
    """Run the ``slipway`` command and end the process with its exit code."""
    from slipway.cli.boundary import run

    run()

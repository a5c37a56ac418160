"""The command line. Everything heavy is imported by the command that needs it."""


def main() -> None:
    """Run the ``slipway`` command and end the process with its exit code."""
    from slipway.cli.boundary import run

    run()

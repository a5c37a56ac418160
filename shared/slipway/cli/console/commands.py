"""``slipway ui``."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer

from slipway.cli.connection import connection_of
from slipway.cli.options import Debug, examples

EXAMPLES = examples(
    "slipway ui", "slipway ui --port 8765 --no-browser", "slipway ui --coordinator exports.example.com:7070"
)

Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on this machine; by default a free one.")]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Print the address, and open no browser.")]


def ui(ctx: typer.Context, port: Port = 0, no_browser: NoBrowser = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Serve pages to begin exports, watch and compare them, and get their outputs: those of this machine, or of a coordinator.

    Only programs of this machine reach the pages, and only with the key in the address. Ctrl-C ends them; an export that runs then can be
    continued.
    """
    settings = connection_of(ctx).settings()
    import tempfile

    from slipway.distribution import require

    require("ui", what="slipway ui")
    from slipway.console.serving import open_in_browser, serve
    from slipway.terminal.console import errors, show, unbroken_line

    with tempfile.TemporaryDirectory(prefix="slipway-ui-") as folder:

        def announce(address: str) -> None:
            show(unbroken_line("", address))
            errors.print("Ctrl-C ends it.", style="dim")
            if not no_browser:  # a browser in the terminal would hold the server up
                threading.Thread(target=open_in_browser, args=(address, Path(folder)), daemon=True).start()

        serve(settings, port=port, announce=announce)

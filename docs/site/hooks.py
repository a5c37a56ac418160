"""Called by mkdocs for each page."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>(?:~(?:\w+\.)*)?")


def on_page_content(html: str, **_: Any) -> str:
    """Show what docstrings refer to (``:class:`~slipway.stage.Stage```) as its plain name."""
    return _ROLE.sub("<code>", html)

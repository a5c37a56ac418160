"""The usage examples of a model card, as readers copy them."""

from __future__ import annotations

import re

_EXAMPLE = re.compile(r"^<!-- example: ([\w. -]+) -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FOLDER_LINE = re.compile(r'^folder = ".*$', re.MULTILINE)


def usage_examples(markdown: str) -> dict[str, str]:
    """Return the Python code of a model card's examples by folder; each runs from the output directory."""
    return {
        folder: _FOLDER_LINE.sub(f'folder = "{folder}"', code, count=1)
        for folders, code in _EXAMPLE.findall(markdown)
        for folder in folders.split()
    }

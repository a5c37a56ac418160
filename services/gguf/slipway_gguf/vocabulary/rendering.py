"""Render a model's chat template in a process with limits: a template may never end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipway.machine.bounded.process import BoundedProcess, Bounds, RefusedWorkError, UnboundedWorkError

QUERY, DOCUMENT = "{query}", "{document}"
"""What llama.cpp's server replaces in a reranker's template."""
_RENDER, _BOUNDS = "slipway_gguf.template_trial:render", Bounds()


def render(template: str, conversations: Sequence[Mapping[str, object]]) -> list[str]:
    """Render conversations in a process with limits of time and memory; return an empty list if one cannot be rendered."""
    try:
        with BoundedProcess(_RENDER, _BOUNDS, imports=("jinja2.sandbox",)) as process:
            return [str(text) for text in process.call(template, conversations)]
    except (RefusedWorkError, UnboundedWorkError):
        return []


def pair_template(template: str) -> str:
    """Return a reranker's prompt with places for both texts; empty if its template has none for a query and a document.

    sentence-transformers and vLLM give such a template one message in the role ``query`` and one in the role ``document``.
    """
    if not template:
        return ""
    messages = [{"role": "query", "content": QUERY}, {"role": "document", "content": DOCUMENT}]
    [text] = render(template, [{"messages": messages}]) or [""]
    return text if text.count(QUERY) == text.count(DOCUMENT) == 1 else ""

"""A page token comes from anybody: whatever is in it, it is a place in a list or a documented reason."""

from __future__ import annotations

import base64
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.errors import ModelExportError
from slipway_coordinator.storage.filters import page_start, page_token
from support.hostile.json_grammar import VALUES, WHOLES, answer

QUERY = ("projects/red", "")
FINGERPRINT = json.loads(base64.urlsafe_b64decode(page_token((0.0, "a"), query=QUERY)))[2]
TOKENS = st.one_of(st.tuples(VALUES, VALUES).map(lambda pair: f'[{pair[0]},{pair[1]},"{FINGERPRINT}"]'), VALUES, WHOLES)


@settings(max_examples=60)
@given(text=TOKENS)
def test_page_tokens(text: str) -> None:
    token = base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode()
    found = answer(lambda: page_start(token, query=QUERY))
    if isinstance(found, ModelExportError):
        assert found.reason == "REQUEST_INVALID"
    elif found is not None:
        assert isinstance(found[0], float)
        found[1].encode()


def test_a_token_longer_than_any_is_not_read() -> None:
    last = base64.b64encode(json.dumps([0.0, "a", FINGERPRINT, *[[]] * 2_000_000]).encode()).decode()
    found = answer(lambda: page_start(last, query=QUERY), seconds=0.2, megabytes=10)
    assert isinstance(found, ModelExportError)
    assert found.reason == "REQUEST_INVALID"

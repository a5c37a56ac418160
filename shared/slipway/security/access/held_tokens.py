"""Identify callers by tokens that this process made itself, and that nobody keeps in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipway.security.access.principals import Principal, match_hashes, token_hash
from slipway.security.access.projects import ALIKE, Projects
from slipway.security.access.refusals import unauthenticated_error


class HeldTokens:
    """Identifies callers by their tokens.

    Args:
        principals: Who each token is; only hashes are kept.
    """

    def __init__(self, principals: Mapping[str, Principal]) -> None:
        self._principals = {token_hash(token): principal for token, principal in principals.items()}

    async def identify(self, *, token: str, certificate_names: Sequence[str]) -> Principal:  # noqa: ARG002 - as the protocol says
        """Identify the caller by its token.

        Raises:
            ServiceError: reason ``UNAUTHENTICATED``.
        """
        matches = match_hashes(token, self._principals)
        for principal, matched in zip(self._principals.values(), matches, strict=True):
            if matched:
                return principal
        raise unauthenticated_error("the token is none of this command")

    def projects(self) -> Projects:
        """Return the limits of projects: none."""
        return ALIKE

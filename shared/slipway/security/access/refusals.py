"""Refusals of callers that cannot be identified, or that nothing is granted to."""

from __future__ import annotations

import math

from slipway.errors import ServiceError
from slipway.rpc.values import RETRY_AFTER


def unauthenticated_error(
    what: str, *, remedy: str = "give --token-file, or the certificate of a principal"
) -> ServiceError:
    """Return the refusal of a caller that cannot be identified."""
    return ServiceError(what, reason="UNAUTHENTICATED", remedy=remedy)


def token_error(issuer: str, what: str, *, remedy: str = "ask the issuer for a new token") -> ServiceError:
    """Return the refusal of a token that claims to be of an issuer; ``what`` repeats nothing of the token but names."""
    return unauthenticated_error(f"a token of the issuer {issuer} {what}", remedy=remedy)


def unavailable_error(issuer: str, what: str, *, retry_seconds: float) -> ServiceError:
    """Return the refusal of a token that cannot be checked now; a retry may help after some seconds."""
    return ServiceError(
        f"tokens of the issuer {issuer} cannot be checked now: {what}",
        reason="ISSUER_UNAVAILABLE",
        remedy="try again later; the keeper of the access file finds the cause in this server's log",
        about={"issuer": issuer, RETRY_AFTER: str(max(1, math.ceil(retry_seconds)))},
    )

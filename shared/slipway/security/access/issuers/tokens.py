"""Check tokens of issuers, and turn their claims into principals.

Nothing of a token is believed before its signature is checked, except for the choice of the issuer and the key that check it. No
message repeats a token, and names in it are shown only after the check.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from slipway.errors import ServiceError
from slipway.files.json_documents import parse_json
from slipway.security.access.issuers.keys import IssuerKeys, KeySource
from slipway.security.access.issuers.settings import Issuer, claim_at, is_email
from slipway.security.access.principals import MOST_TOKEN_BYTES, Principal, Role
from slipway.security.access.refusals import token_error, unauthenticated_error
from slipway.texts import hidden_character, quoted

if TYPE_CHECKING:
    from joserfc.jws import JWSRegistry

    from slipway.security.access.issuers.keys import PublicKey

_TOKEN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
_MOST_VALUES = 2000
_MOST_HEADER_BYTES = 4096
_MOST_SIGNATURE_BYTES = 2048
_LONGEST_NAME, _LONGEST_SUBJECT = 100, 400
_NO_TOKEN = "the token is no signed token that can be read"  # noqa: S105 - it is a message


def is_signed_token(token: str) -> bool:
    """Return whether a token has the form of a signed JSON Web Token."""
    return _TOKEN.fullmatch(token) is not None


class Issuers:
    """Identifies callers by tokens of some issuers. All methods run on one event loop.

    Args:
        now: Seconds since the epoch.
    """

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._settings: tuple[Issuer, ...] = ()
        self._keys: dict[KeySource, IssuerKeys] = {}

    def use(self, settings: tuple[Issuer, ...]) -> None:
        """Use these issuers from now on; keys of those whose source stays the same are kept."""
        if settings is self._settings:
            return
        sources = [KeySource.of(issuer) for issuer in settings]
        self._keys = {source: self._keys.get(source) or IssuerKeys(source) for source in sources}
        self._settings = settings

    async def identify(self, token: str) -> Principal:
        """Return the principal of a token.

        Raises:
            ServiceError: reason ``UNAUTHENTICATED``, ``ISSUER_UNAVAILABLE``, or ``PERMISSION_DENIED`` for a good token that no rule
                fits.
        """
        if len(token) > MOST_TOKEN_BYTES:
            raise unauthenticated_error(f"the token has {len(token)} bytes, {MOST_TOKEN_BYTES} are allowed")
        header, claims = (_read_part(part) for part in token.split(".")[:2])
        issuer = next((one for one in self._settings if one.issuer == claims.get("iss")), None)
        if issuer is None:
            raise unauthenticated_error(
                "the token is of an issuer that is not accepted here",
                remedy="use a token of an issuer in the access file",
            )
        _check_header(issuer, header)
        key = await self._keys[KeySource.of(issuer)].find(header.get("kid", ""))
        if key is None:
            raise token_error(issuer.name, "is signed with a key that the issuer does not have")
        return principal_of(issuer, verified_claims(issuer, token, key, now=int(self._now())))


def verified_claims(issuer: Issuer, token: str, key: PublicKey, *, now: int) -> dict[str, Any]:
    """Return the claims of a token whose signature, times, issuer and audience are right.

    Raises:
        ServiceError: reason ``UNAUTHENTICATED``.
    """
    from joserfc import jws
    from joserfc.errors import ExpiredTokenError, InvalidClaimError, JoseError, MissingClaimError
    from joserfc.jwt import JWTClaimsRegistry

    try:
        checked = jws.deserialize_compact(token, key, registry=_registry(issuer))
        claims = parse_json(checked.payload or b"", most_values=_MOST_VALUES)
    except (JoseError, ValueError, TypeError) as error:
        raise token_error(issuer.name, "has a signature that is not the issuer's") from error
    expected = JWTClaimsRegistry(
        now=now,
        leeway=issuer.leeway_seconds,
        iss={"essential": True, "value": issuer.issuer},
        aud={"essential": True, "values": list(issuer.audiences)},
        exp={"essential": True},
        sub={"essential": True},
    )
    try:
        expected.validate(claims)
    except ExpiredTokenError as error:
        raise token_error(issuer.name, "has expired") from error
    except MissingClaimError as error:
        raise token_error(issuer.name, f"lacks the claim {error.claim}") from error
    except InvalidClaimError as error:
        raise token_error(issuer.name, f"cannot be accepted: {_problem(str(error.claim), issuer)}") from error
    return dict(claims)


def principal_of(issuer: Issuer, claims: dict[str, Any]) -> Principal:
    """Return what the first rule that fits grants to a token's holder.

    Raises:
        ServiceError: reason ``UNAUTHENTICATED`` for a name that cannot be used, or an email that is not verified;
            ``PERMISSION_DENIED`` if no rule fits.
    """
    prefix = f"{issuer.name}:"
    own = _text(issuer, issuer.name_claim, claim_at(claims, issuer.name_claim), most=_LONGEST_NAME - len(prefix))
    name = prefix + own
    subject = _text(issuer, "sub", claims["sub"], most=_LONGEST_SUBJECT)
    rule = next((rule for rule in issuer.rules if rule.fits(claims)), None)
    # Refused also if a later rule fits without the email: it may grant more than the one that is meant for this email.
    if (is_email(issuer.name_claim) or (rule is not None and rule.uses_email)) and not _has_verified_email(
        issuer, claims
    ):
        raise token_error(
            issuer.name,
            "has an email that its issuer has not verified",
            remedy="verify it at the issuer; if its tokens have no email_verified, see trusts_emails in docs/security.md",
        )
    if rule is None:
        raise ServiceError(
            f"no rule of the issuer {issuer.name} grants anything to {name}",
            reason="PERMISSION_DENIED",
            remedy="ask the keeper of the access file for a rule that fits your claims",
            about={"issuer": issuer.name},
        )
    return Principal(
        name, frozenset({Role(rule.role)}), rule.projects, rule.holds_store, issuer=issuer.issuer, subject=subject
    )


def names_taken(names: Iterable[str], issuers: Iterable[Issuer]) -> list[str]:
    """Return the names that callers of an issuer could have too."""
    prefixes = tuple(f"{issuer.name}:" for issuer in issuers)
    return [name for name in names if name.startswith(prefixes)] if prefixes else []


def _has_verified_email(issuer: Issuer, claims: dict[str, Any]) -> bool:
    return claims.get("email_verified", issuer.trusts_emails) is True


def _registry(issuer: Issuer) -> JWSRegistry:
    from joserfc.jws import JWSRegistry

    registry = JWSRegistry(algorithms=list(issuer.algorithms), strict_check_header=False)
    # Only Ed25519's keys, whichever name a token has for it; the library's own EdDSA takes Ed448, too.
    registry.algorithms = registry.algorithms | {"EdDSA": registry.algorithms["Ed25519"]}
    registry.max_header_length = _MOST_HEADER_BYTES
    registry.max_signature_length = _MOST_SIGNATURE_BYTES
    return registry


def _check_header(issuer: Issuer, header: dict[str, Any]) -> None:
    """Refuse a token that is not signed by an algorithm of the issuer, or that has extensions."""
    if header.get("alg") not in issuer.algorithms:
        raise token_error(
            issuer.name, f"is signed by {quoted(header.get('alg'))}, not by {' or '.join(issuer.algorithms)}"
        )
    if "crit" in header or "b64" in header or not isinstance(header.get("kid", ""), str):
        raise token_error(issuer.name, "has a header that cannot be read")


def _read_part(part: str) -> dict[str, Any]:
    """Return the JSON object in a part of a token, of which nothing is checked yet."""
    try:
        document = parse_json(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)), most_values=_MOST_VALUES)
    except ValueError as error:
        raise unauthenticated_error(_NO_TOKEN) from error
    if not isinstance(document, dict):
        raise unauthenticated_error(_NO_TOKEN)
    return document


def _problem(claim: str, issuer: Issuer) -> str:
    match claim:
        case "aud":
            return f"it is for another audience than {' or '.join(issuer.audiences)}"
        case "nbf" | "iat":
            return "it is not valid yet"
        case _:
            return f"its claim {claim} is not valid"


def _text(issuer: Issuer, claim: str, value: Any, *, most: int) -> str:
    """Return a claim that is a text to be shown."""
    if not isinstance(value, str) or not value.strip():
        raise token_error(issuer.name, f"has no text in the claim {claim}")
    if len(value) > most or hidden_character(value):
        raise token_error(issuer.name, f"has more than {most} characters, or hidden ones, in the claim {claim}")
    return value

"""The section ``issuers:`` of the access file: whose tokens are accepted, and what their claims grant.

::

    issuers:
      - name: keycloak                     # prefix of its callers' names: keycloak:alice
        issuer: https://id.example/realms/ml
        audiences: [slipway]
        name_claim: preferred_username     # sub by default
        rules:                             # the first one that fits decides
          - claims: {groups: ml-operators}
            role: operator
            projects: ["*"]
      - name: cluster
        issuer: https://kubernetes.default.svc.cluster.local
        audiences: [slipway]
        jwks_url: https://kubernetes.default.svc/openid/v1/jwks
        ca_file: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
        rules:
          - claims: {/kubernetes.io/namespace: slipway, /kubernetes.io/serviceaccount/name: worker}
            role: worker
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StringConstraints, model_validator

from slipway.security.access.grants import Grant
from slipway.security.outgoing import check_address
from slipway.texts import hidden_character

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA"
]  # fmt: skip
"""Signatures by a private key. With a shared secret (HS256 …), or without a signature (none), anybody could make tokens.

``EdDSA`` is the older name of ``Ed25519`` (RFC 9864), which most issuers send; Ed448, which it could mean too, is not accepted.
"""

_ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
_Text = Annotated[str, StringConstraints(min_length=1, max_length=512, strict=True)]
_Value = StrictBool | StrictInt | _Text
_MISSING = object()


class ClaimRule(Grant):
    """What a token with certain claims grants.

    Attributes:
        claims: Values by claim; a list of values accepts any of them, and a claim that is a list needs one of them. A claim is
            named as it is in the token, or by a JSON pointer (``/kubernetes.io/namespace``). Without claims, every token fits.
    """

    claims: dict[_Text, _Value | tuple[_Value, ...]] = Field(max_length=32)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check("a rule")
        for claim, values in self.claims.items():
            if isinstance(values, tuple) and not values:
                raise ValueError(f"{claim}: name at least one value")
        return self

    @property
    def uses_email(self) -> bool:
        """Whether it grants something to an email."""
        return any(is_email(claim) for claim in self.claims)

    def fits(self, claims: dict[str, Any]) -> bool:
        """Return whether a token's claims are those of this rule."""
        return all(_has(claim_at(claims, claim), values) for claim, values in self.claims.items())


class Issuer(BaseModel):
    """An issuer of tokens; its keys come from ``jwks_file``, else ``jwks_url``, else the issuer's discovery document.

    Attributes:
        trusts_emails: Whether emails of tokens without ``email_verified`` are used as names and by rules. At some issuers (Entra
            ID), anybody can have any email.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?$")
    issuer: _Text
    audiences: tuple[_Text, ...] = Field(min_length=1, max_length=16)
    name_claim: _Text = "sub"
    algorithms: tuple[Algorithm, ...] = Field(default=_ALGORITHMS, min_length=1)
    jwks_url: _Text | None = None
    jwks_file: Path | None = None
    ca_file: Path | None = None
    token_file: Path | None = None
    trusts_emails: bool = False
    leeway_seconds: int = Field(default=30, ge=0, le=300)
    refresh_seconds: float = Field(default=30.0, ge=1.0, le=300.0)
    rules: tuple[ClaimRule, ...] = Field(min_length=1, max_length=1000)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.jwks_url is not None and self.jwks_file is not None:
            raise ValueError(f"{self.name}: give jwks_url or jwks_file, not both")
        if self.jwks_file is not None and (self.ca_file is not None or self.token_file is not None):
            raise ValueError(f"{self.name}: ca_file and token_file are of keys that are fetched, not of jwks_file")
        if hidden_character(self.issuer):
            raise ValueError(f"{self.name}: the issuer has the character {hidden_character(self.issuer)}")
        if self.jwks_file is None:
            for url in filter(None, (self.jwks_url or self.issuer,)):
                check_url(url)
        return self


def check_url(url: str) -> str:
    """Return an address that keys may be fetched from: HTTPS, or plain HTTP on this machine.

    Raises:
        ValueError: It is another one; the message does not repeat it, as it may hold a password.
    """
    return check_address(url, what="the address of an issuer or its keys")


def origin_of(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port of an address of :func:`check_url`."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def claim_at(claims: dict[str, Any], name: str) -> Any:
    """Return a claim by its name or its JSON pointer (RFC 6901); a missing one equals nothing."""
    if not name.startswith("/"):
        return claims.get(name, _MISSING)
    value: Any = claims
    for part in name[1:].split("/"):
        if not isinstance(value, dict):
            return _MISSING
        value = value.get(part.replace("~1", "/").replace("~0", "~"), _MISSING)
    return value


def is_email(name: str) -> bool:
    """Return whether the name of a claim, or its JSON pointer, is that of the holder's email."""
    return name.removeprefix("/") == "email"


def _has(claim: Any, values: Any) -> bool:
    """Return whether a claim, or one entry of it, is one of some values; ``true`` is not 1."""
    entries = claim if isinstance(claim, list) else [claim]
    accepted = {(type(value), value) for value in (values if isinstance(values, tuple) else (values,))}
    return any(isinstance(entry, str | int) and (type(entry), entry) in accepted for entry in entries)

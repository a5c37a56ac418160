"""The public keys of an issuer: fetched when they are needed, kept for a while, fetched again for an unknown key."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slipway.files.json_documents import read_json_object
from slipway.security.access.issuers.fetching import MOST_BYTES, FetchError, fetch_json, run_fetch
from slipway.security.access.issuers.settings import Issuer, check_url, origin_of
from slipway.security.access.refusals import unavailable_error
from slipway.security.outgoing import Connections
from slipway.security.reloading import signature

if TYPE_CHECKING:
    from joserfc.jwk import ECKey, OKPKey, RSAKey

    PublicKey = RSAKey | ECKey | OKPKey

log = logging.getLogger("slipway.security")

MOST_KEYS = 100
_RSA_BITS = range(2048, 8193)
"""A shorter key can be broken; a longer one makes every check slow."""
_FRESH_SECONDS = 300.0
"""Keys older than this are fetched again in the background."""
_KEPT_SECONDS = 3600.0
"""Keys are used for so long after the last good fetch: a withdrawn key must not live for as long as its issuer is silent."""
_RETRY_SECONDS = 10.0
"""Longest time between two fetches while they fail: a large ``refresh_seconds`` must not make a short outage a long one."""
MOST_WAITING = 128
"""Calls that wait for one fetch: they wait before they are identified, so no limit of a caller counts them."""


class KeySource(NamedTuple):
    """Where an issuer's keys come from; keys are kept for as long as this stays the same."""

    name: str
    issuer: str
    url: str | None
    file: Path | None
    ca_file: Path | None
    token_file: Path | None
    refresh_seconds: float

    @classmethod
    def of(cls, issuer: Issuer) -> KeySource:
        """Return the source of an issuer's keys."""
        files = issuer.jwks_file, issuer.ca_file, issuer.token_file
        return cls(issuer.name, issuer.issuer, issuer.jwks_url, *files, issuer.refresh_seconds)

    def load(self, connections: Connections) -> Mapping[str, PublicKey]:
        """Return the keys by their ids; blocks until the connections are ended.

        Raises:
            FetchError: They cannot be read, or there is none.
        """
        if self.file is not None:
            try:
                return public_keys(read_json_object(self.file, largest=MOST_BYTES))
            except (OSError, ValueError) as error:
                raise FetchError(f"{self.file} cannot be read: {error}") from error
        return public_keys(self._fetch(self.url or self._discover(connections), connections))

    def _discover(self, connections: Connections) -> str:
        document = self._fetch(f"{self.issuer.removesuffix('/')}/.well-known/openid-configuration", connections)
        url = document.get("jwks_uri")
        if document.get("issuer") != self.issuer or not isinstance(url, str):
            raise FetchError(f"the discovery document of {self.issuer} is of another issuer, or names no jwks_uri")
        try:
            return check_url(url)
        except ValueError as error:
            raise FetchError(f"jwks_uri of {self.issuer}: {error}") from error

    def _fetch(self, url: str, connections: Connections) -> dict[str, Any]:
        # jwks_uri may name any host, such as a public bucket: the token of this server is only for those configured.
        is_configured = origin_of(url) == origin_of(self.url or self.issuer)
        try:
            token_file = self.token_file if is_configured else None
            return fetch_json(url, connections, ca_file=self.ca_file, token_file=token_file)
        except FetchError as error:
            if self.token_file is None or is_configured:
                raise
            raise FetchError(f"{error}; token_file is not shown there: name the address in jwks_url") from error


class IssuerKeys:
    """The keys of one issuer. All methods run on one event loop, which they never block.

    Keys are fetched at most once in ``refresh_seconds``, however many tokens name unknown keys, and by one fetch at a time. So an
    unknown key may be a new one: that the issuer does not have it is known only after a fetch that began for it.

    Args:
        source: Where they come from.
        clock: Seconds; only differences matter.
    """

    def __init__(self, source: KeySource, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock = source, clock
        self._keys: Mapping[str, PublicKey] = {}
        self._loaded: float | None = None
        self._tried: float | None = None
        self._seen = signature(())
        self._problem = ""
        self._fetching: asyncio.Task[None] | None = None
        self._waiting = 0
        self._withdrawn: frozenset[str] = frozenset()  # by the last fetch

    async def find(self, kid: str) -> PublicKey | None:
        """Return the key of an id; without an id the only key. None if the issuer has no such key.

        Raises:
            ServiceError: reason ``ISSUER_UNAVAILABLE`` if there are no keys, or they may be outdated and lack this one.
        """
        is_known = False
        if not self._are_kept() or self._is_rewritten() or self._get(kid) is None:
            is_known = await self._refresh() or self._is_settled(kid)
        elif self._age() > _FRESH_SECONDS:
            self._start()
        key = self._get(kid) if self._are_kept() else None
        if key is None and not is_known:
            what = "its keys cannot be fetched" if self._problem else "it may have a new key, which is not fetched yet"
            raise unavailable_error(self._source.name, what, retry_seconds=self._pause())
        return key

    def _is_settled(self, kid: str) -> bool:
        """Return whether another fetch would not bring a key that is missing."""
        if not self._are_kept() or self._is_rewritten():
            return False
        return self._source.file is not None or kid in self._withdrawn or (not kid and len(self._keys) > 1)

    def _get(self, kid: str) -> PublicKey | None:
        if kid:
            return self._keys.get(kid)
        return next(iter(self._keys.values())) if len(self._keys) == 1 else None

    def _age(self) -> float:
        return float("inf") if self._loaded is None else self._clock() - self._loaded

    def _are_kept(self) -> bool:
        return self._age() < _KEPT_SECONDS

    def _is_rewritten(self) -> bool:
        return self._source.file is not None and signature((self._source.file,)) != self._seen

    async def _refresh(self) -> bool:
        """Wait for a fetch, unless one was tried only just now or too many calls wait already.

        Return whether it began for this call, and brought keys.
        """
        is_joined, loaded = self._fetching is not None, self._loaded
        task = self._start()
        if task is None or self._waiting >= MOST_WAITING:
            return False
        self._waiting += 1
        try:
            await asyncio.wait([task])  # until FETCH_SECONDS at most
        finally:
            self._waiting -= 1
        return not is_joined and self._loaded != loaded

    def _pause(self) -> float:
        """Return the seconds until a fetch may begin; none while one is under way."""
        if self._tried is None or self._fetching is not None:
            return 0.0
        pause = self._source.refresh_seconds
        return self._tried + (min(pause, _RETRY_SECONDS) if self._problem else pause) - self._clock()

    def _start(self) -> asyncio.Task[None] | None:
        """Return the fetch under way, or begin one if the last one was long enough ago."""
        if self._fetching is None:
            if self._pause() > 0:
                return None
            self._tried = self._clock()
            self._fetching = asyncio.create_task(self._fetch(), context=contextvars.Context())
        return self._fetching

    async def _fetch(self) -> None:
        try:
            seen = signature(() if self._source.file is None else (self._source.file,))
            keys = await run_fetch(self._source.load)
        except FetchError as error:
            self._problem = str(error)
            log.warning(f"the keys of the issuer {self._source.name} cannot be fetched: {self._problem}")
        else:
            if self._problem or self._loaded is None:
                log.info(f"the issuer {self._source.name} has {len(keys)} keys")
            self._withdrawn = frozenset(self._keys) - frozenset(keys)
            self._keys, self._loaded, self._problem, self._seen = keys, self._clock(), "", seen
        finally:
            self._fetching = None


def public_keys(document: Mapping[str, Any]) -> Mapping[str, PublicKey]:
    """Return the keys of a JWK set that can check signatures, by their ids. Keys of other kinds are left out.

    Raises:
        FetchError: There is none, there are too many, or two have the same id.
    """
    entries = document.get("keys")
    if not isinstance(entries, list) or len(entries) > MOST_KEYS:
        raise FetchError(f"it is not a list of at most {MOST_KEYS} keys")
    keys: dict[str, PublicKey] = {}
    for entry in entries:
        key = _public_key(entry)
        if key is None:
            continue
        kid = key.kid or key.thumbprint()
        if kid in keys:
            raise FetchError("two of its keys have the same id")
        keys[kid] = key
    if not keys:
        raise FetchError("it has no key that can check a signature")
    return keys


def _public_key(entry: Any) -> PublicKey | None:
    """Return a key for checking signatures; None for every other entry."""
    from joserfc.errors import JoseError
    from joserfc.jwk import ECKey, OKPKey, RSAKey

    kinds: Mapping[Any, type[PublicKey]] = {"RSA": RSAKey, "EC": ECKey, "OKP": OKPKey}
    if not isinstance(entry, dict) or not isinstance(entry.get("kty"), str) or entry.get("use", "sig") != "sig":
        return None
    kind = kinds.get(entry["kty"])
    if (
        kind is None
        or not isinstance(entry.get("key_ops", []), list)
        or "verify" not in entry.get("key_ops", ["verify"])
    ):
        return None
    members = {name: value for name, value in entry.items() if name not in {"x5c", "x5u", "x5t", "x5t#S256"}}
    if members.get("alg") == "EdDSA":
        members["alg"] = "Ed25519"  # one name for both, as tokens have either
    try:
        key = kind.import_key(members)
        if isinstance(key, RSAKey) and key.public_key.key_size not in _RSA_BITS:
            return None
    except (JoseError, ValueError, TypeError, LookupError, OverflowError):
        return None
    return key

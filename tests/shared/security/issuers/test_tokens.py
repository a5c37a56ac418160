"""Which tokens of an issuer are accepted, as whom, and by what name the others are refused."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from joserfc.jwk import ECKey, OKPKey, RSAKey

from slipway.errors import ModelExportError, ServiceError
from slipway.security.access.access_file import AccessFile, load_access
from slipway.security.access.principals import MOST_TOKEN_BYTES, Principal, Role, token_hash
from support.servers.oidc_issuer import AUDIENCE, OidcIssuer, oidc_issuer

RULES: list[dict[str, Any]] = [
    {"claims": {"groups": ["ml", "research"]}, "role": "submitter", "projects": ["red"]},
    {
        "claims": {"/kubernetes.io/namespace": "slipway", "/kubernetes.io/serviceaccount/name": "merge"},
        "role": "worker",
    },
    {"claims": {"sub": "alice"}, "role": "viewer", "projects": ["*"]},
]


@pytest.fixture
def issuer() -> Iterator[OidcIssuer]:
    with oidc_issuer() as running:
        yield running


class Access:
    """An access file that names issuers."""

    def __init__(self, folder: Path, *issuers: dict[str, Any], **sections: Any) -> None:
        self.path = folder / "access.yaml"
        self.write(*issuers, **sections)
        self.file = AccessFile(self.path)

    def write(self, *issuers: dict[str, Any], **sections: Any) -> None:
        self.path.write_text(json.dumps({"issuers": list(issuers), **sections}))

    async def identify(self, token: str) -> Principal:
        return await self.file.identify(token=token, certificate_names=())

    async def refusal(self, token: str) -> ServiceError:
        with pytest.raises(ServiceError) as caught:
            await self.identify(token)
        assert token not in str(caught.value)
        return caught.value


def entry(issuer: OidcIssuer, /, **changes: Any) -> dict[str, Any]:
    entry = {"name": "id", "issuer": issuer.url, "audiences": [AUDIENCE], "refresh_seconds": 300, "rules": RULES}
    return {name: value for name, value in (entry | changes).items() if value is not None}


@pytest.fixture
def access(tmp_path: Path, issuer: OidcIssuer) -> Access:
    return Access(tmp_path, entry(issuer))


async def test_a_good_token_is_who_it_says(access: Access, issuer: OidcIssuer) -> None:
    principal = await access.identify(issuer.token())
    assert principal == Principal(
        "id:alice", frozenset({Role.VIEWER}), frozenset({"*"}), issuer=issuer.url, subject="alice"
    )
    await access.identify(issuer.token(aud=["other", AUDIENCE], sub="alice"))
    assert issuer.asked == {"/.well-known/openid-configuration": 1, "/keys": 1}


@pytest.mark.parametrize(
    ("groups", "role"),
    [
        ("ml", Role.SUBMITTER),
        (["guests", "research"], Role.SUBMITTER),
        ("mlx", Role.VIEWER),
        ("ml research", Role.VIEWER),
        ([["ml"]], Role.VIEWER),
        ({"ml": 1}, Role.VIEWER),
        ([None, 1, True, {}], Role.VIEWER),
        (["x"] * 1000 + ["ml"], Role.SUBMITTER),
    ],
)
async def test_the_first_rule_that_fits_decides(access: Access, issuer: OidcIssuer, groups: Any, role: Role) -> None:
    assert (await access.identify(issuer.token(groups=groups))).roles == {role}


async def test_a_service_account_is_a_worker(access: Access, issuer: OidcIssuer) -> None:
    sub = "system:serviceaccount:slipway:merge"
    claims: dict[str, Any] = {
        "namespace": "slipway",
        "serviceaccount": {"name": "merge", "uid": "1"},
        "pod": {"name": "merge-0"},
    }
    changes: dict[str, Any] = {"kubernetes.io": claims}
    principal = await access.identify(issuer.token(sub=sub, **changes))
    assert (principal.name, principal.roles, principal.projects) == (f"id:{sub}", frozenset({Role.WORKER}), frozenset())
    others: list[Any] = [{**claims, "namespace": "default"}, "slipway", {"serviceaccount": claims}]
    for other in others:
        changes = {"kubernetes.io": other}
        assert (await access.refusal(issuer.token(sub=sub, **changes))).reason == "PERMISSION_DENIED"


NOW = int(time.time())
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "expired": ({"exp": NOW - 60}, "has expired"),
    "without an end": ({"exp": None}, "lacks the claim exp"),
    "an end that is text": ({"exp": str(NOW + 600)}, "claim exp is not valid"),
    "an end that is true": ({"exp": True}, "claim exp is not valid"),
    "not valid yet": ({"nbf": NOW + 10**6}, "not valid yet"),
    "issued in the future": ({"iat": NOW + 10**6}, "not valid yet"),
    "another audience": ({"aud": "other"}, "another audience than slipway"),
    "a part of the audience": ({"aud": "slip"}, "another audience"),
    "no audience": ({"aud": None}, "lacks the claim aud"),
    "an audience of a wrong type": ({"aud": {AUDIENCE: 1}}, "claim aud|another audience"),
    "another issuer": ({"iss": "https://id.example"}, "not accepted here"),
    "no issuer": ({"iss": None}, "not accepted here"),
    "an issuer of a wrong type": ({"iss": ["https://id.example"]}, "not accepted here"),
    "no subject": ({"sub": None}, "lacks the claim sub"),
    "a subject of a wrong type": ({"sub": ["alice"]}, "claim sub"),
    "a subject with control characters": ({"sub": "alice\x1b[2J"}, "hidden ones, in the claim sub"),
    "a subject that turns text": ({"sub": "\u202eecila"}, "hidden ones, in the claim sub"),
    "a subject of blanks": ({"sub": "  "}, "no text in the claim sub"),
    "a long subject": ({"sub": "a" * 200}, "more than 97 characters"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_is_not_right_is_refused_by_name(access: Access, issuer: OidcIssuer, what: str) -> None:
    claims, message = REFUSED[what]
    refused = await access.refusal(issuer.token(**claims))
    assert refused.reason == "UNAUTHENTICATED"
    assert re.search(message, refused.message), refused.message
    assert "\x1b" not in str(refused)


async def test_clocks_may_differ_a_little(access: Access, issuer: OidcIssuer) -> None:
    now = int(time.time())
    await access.identify(issuer.token(exp=now - 10, nbf=now + 10, iat=now + 10))


def part(document: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(document).encode()).decode().rstrip("=")


async def test_a_token_without_a_signature_is_refused(access: Access, issuer: OidcIssuer) -> None:
    for algorithm in ("none", "None", "NONE"):
        for signature in ("", "AAAA"):
            token = f"{part({'alg': algorithm, 'kid': 'first'})}.{part(issuer.claims())}.{signature}"
            assert "is signed by" in (await access.refusal(token)).message
    header, claims, signature = issuer.token().split(".")
    assert "signature" in (await access.refusal(f"{header}.{claims}.")).message
    assert "signature" in (await access.refusal(f"{header}.{part(issuer.claims(groups='ml'))}.{signature}")).message


async def test_the_public_key_is_no_secret(tmp_path: Path, issuer: OidcIssuer) -> None:
    key = RSAKey.generate_key(2048, {"kid": "rsa", "use": "sig"})
    issuer.keys = {"rsa": key}
    access = Access(tmp_path, entry(issuer))
    await access.identify(issuer.token(header={"alg": "RS256"}))
    forms = [key.as_pem(private=False), json.dumps(key.as_dict(private=False)).encode()]
    forms.append(key.public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    for form in forms:
        signed = f"{part({'alg': 'HS256', 'kid': 'rsa'})}.{part(issuer.claims())}"
        signature = hmac.new(form, signed.encode(), hashlib.sha256).digest()
        token = f"{signed}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"
        assert "is signed by 'HS256'" in (await access.refusal(token)).message


@pytest.mark.parametrize("of_key", ["EdDSA", "Ed25519", None])
@pytest.mark.parametrize("of_token", ["EdDSA", "Ed25519"])
async def test_both_names_of_ed25519_are_taken(
    access: Access, issuer: OidcIssuer, of_key: str | None, of_token: str
) -> None:
    named: dict[str, Any] = {"kid": "edwards"} | ({"alg": of_key} if of_key else {})
    issuer.keys = {"edwards": OKPKey.generate_key("Ed25519", named)}
    private = issuer.keys["edwards"].private_key
    assert isinstance(private, Ed25519PrivateKey)
    signed = f"{part({'alg': of_token, 'kid': 'edwards'})}.{part(issuer.claims())}"
    signature = base64.urlsafe_b64encode(private.sign(signed.encode())).decode().rstrip("=")
    assert (await access.identify(f"{signed}.{signature}")).name == "id:alice"
    assert "signature" in (await access.refusal(f"{signed}.{'A' * 86}")).message


async def test_eddsa_is_not_ed448(access: Access, issuer: OidcIssuer) -> None:
    issuer.keys = {"edwards": OKPKey.generate_key("Ed448", {"kid": "edwards"})}
    private = issuer.keys["edwards"].private_key
    assert isinstance(private, Ed448PrivateKey)
    signed = f"{part({'alg': 'EdDSA', 'kid': 'edwards'})}.{part(issuer.claims())}"
    signature = base64.urlsafe_b64encode(private.sign(signed.encode())).decode().rstrip("=")
    assert "signature" in (await access.refusal(f"{signed}.{signature}")).message


async def test_a_signature_of_another_key_is_refused(access: Access, issuer: OidcIssuer) -> None:
    mine = ECKey.generate_key("P-256")
    refused = [
        issuer.token(key=mine),
        issuer.token(key=mine, header={"jwk": mine.as_dict(private=False)}),
        issuer.token(key=RSAKey.generate_key(2048), header={"alg": "RS256"}),
    ]
    unknown = await access.refusal(issuer.token(key=mine, header={"kid": "mine"}))
    assert "a key that the issuer does not have" in unknown.message
    for token in refused:
        assert "signature" in (await access.refusal(token)).message
    assert "header" in (await access.refusal(issuer.token(header={"crit": ["kid"]}))).message


async def test_without_an_id_the_only_key_is_meant(access: Access, issuer: OidcIssuer) -> None:
    await access.identify(issuer.token(header={"kid": None}))


async def test_two_issuers_are_apart(tmp_path: Path, issuer: OidcIssuer) -> None:
    with oidc_issuer() as other:
        rules = [{"claims": {}, "role": "viewer", "projects": ["blue"]}]
        access = Access(tmp_path, entry(issuer), entry(other, name="other", rules=rules))
        assert (await access.identify(other.token())).name == "other:alice"
        assert (await access.identify(issuer.token())).projects == {"*"}
        forged = other.token(iss=issuer.url)
        assert "signature" in (await access.refusal(forged)).message


async def test_a_token_that_no_rule_fits_is_denied(access: Access, issuer: OidcIssuer) -> None:
    refused = await access.refusal(issuer.token(sub="mallory"))
    assert (refused.reason, refused.about) == ("PERMISSION_DENIED", {"issuer": "id"})
    assert "id:mallory" in refused.message


async def test_a_large_token_is_refused_before_it_is_read(access: Access, issuer: OidcIssuer) -> None:
    for size in (MOST_TOKEN_BYTES, 1 << 20):
        assert "bytes" in (await access.refusal(issuer.token(padding="x" * size))).message
    assert not issuer.asked
    deep = "[" * 4000 + "]" * 4000
    body = base64.urlsafe_b64encode(deep.encode()).decode()[:8000]
    assert (await access.refusal(f"{body[:4000]}.{body[:4000]}.")).reason == "UNAUTHENTICATED"


EMAIL = "alice@example.org"
OF_EMAILS: dict[str, dict[str, Any]] = {
    "a name": {"name_claim": "email"},
    "a name by a pointer": {"name_claim": "/email"},
    "a rule": {"rules": [{"claims": {"email": EMAIL}, "role": "operator", "projects": ["*"]}, *RULES]},
    "a rule by a pointer": {"rules": [{"claims": {"/email": [EMAIL]}, "role": "operator", "projects": ["*"]}, *RULES]},
}


@pytest.mark.parametrize("what", OF_EMAILS)
async def test_emails_are_verified_ones(tmp_path: Path, issuer: OidcIssuer, what: str) -> None:
    access = Access(tmp_path, entry(issuer, **OF_EMAILS[what]))
    name = EMAIL if "name_claim" in OF_EMAILS[what] else "alice"
    assert (await access.identify(issuer.token(email=EMAIL, email_verified=True))).name == f"id:{name}"
    for verified in (False, "true", 0, None):  # None is left out
        assert "not verified" in (await access.refusal(issuer.token(email=EMAIL, email_verified=verified))).message
    access.write(entry(issuer, trusts_emails=True, **OF_EMAILS[what]))
    assert (await access.identify(issuer.token(email=EMAIL))).name == f"id:{name}"
    assert "not verified" in (await access.refusal(issuer.token(email=EMAIL, email_verified=False))).message


async def test_rules_without_an_email_need_no_verified_one(tmp_path: Path, issuer: OidcIssuer) -> None:
    access = Access(tmp_path, entry(issuer, **OF_EMAILS["a rule"]))
    assert (await access.identify(issuer.token(email="bob@example.org", email_verified=False))).roles == {Role.VIEWER}


async def test_tokens_of_the_file_stay_good_beside_issuers(tmp_path: Path, issuer: OidcIssuer) -> None:
    token = issuer.token(iss="https://nobody.example")  # a token of the file may look like an issuer's
    principals = [{"name": "ci", "role": "viewer", "projects": ["red"], "token_sha256": token_hash(token)}]
    access = Access(tmp_path, entry(issuer), principals=principals)
    assert (await access.identify(token)).name == "ci"
    assert (await access.identify(issuer.token())).name == "id:alice"
    assert (await access.refusal("x" * 40)).message == "the token is not known"


async def test_rules_change_without_another_look_at_the_keys(access: Access, issuer: OidcIssuer) -> None:
    await access.identify(issuer.token())
    access.write(entry(issuer, rules=RULES[:1]))
    assert (await access.refusal(issuer.token())).reason == "PERMISSION_DENIED"
    assert issuer.asked["/keys"] == 1


WRONG_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "plain http": ({"issuer": "http://id.example"}, "begins with https://"),
    "a file": ({"issuer": "file:///etc/passwd"}, "begins with https://"),
    "a password": ({"jwks_url": "https://a:s3cret@id.example/keys"}, "no user, password"),
    "an impossible port": ({"jwks_url": "https://id.example:99999/"}, "[Pp]ort"),
    "a shared secret": ({"algorithms": ["HS256"]}, "algorithms"),
    "no signature": ({"algorithms": ["none"]}, "algorithms"),
    "no audience": ({"audiences": []}, "audiences"),
    "no rule": ({"rules": []}, "rules"),
    "a rule without projects": ({"rules": [{"claims": {}, "role": "viewer"}]}, "name its projects"),
    "a worker with projects": ({"rules": [{"claims": {}, "role": "worker", "projects": ["*"]}]}, "leave out projects"),
    "a claim without values": ({"rules": [{"claims": {"a": []}, "role": "worker"}]}, "at least one value"),
    "two sources": ({"jwks_url": "https://id.example/keys", "jwks_file": "/keys"}, "not both"),
    "keys that are fetched too seldom": ({"refresh_seconds": 3600}, "refresh_seconds: .*300"),
    "an unknown setting": ({"key": "x"}, "key"),
    "a name with a colon": ({"name": "a:b"}, "name"),
}


@pytest.mark.parametrize("what", WRONG_SETTINGS)
def test_impossible_settings_are_refused_at_the_start(tmp_path: Path, issuer: OidcIssuer, what: str) -> None:
    changes, message = WRONG_SETTINGS[what]
    with pytest.raises(ModelExportError, match=message) as caught:
        Access(tmp_path, entry(issuer, **changes))
    assert caught.value.reason == "ACCESS_INVALID"
    assert "s3cret" not in str(caught.value)


def test_no_principal_can_be_taken_for_an_issuers(tmp_path: Path, issuer: OidcIssuer) -> None:
    principals = [{"name": "id:alice", "role": "viewer", "projects": ["red"], "token_sha256": "0" * 64}]
    with pytest.raises(ModelExportError, match="choose another name"):
        Access(tmp_path, entry(issuer), principals=principals)
    with pytest.raises(ModelExportError, match="two issuers have the same issuer"):
        Access(tmp_path, entry(issuer), entry(issuer, name="again"))
    with pytest.raises(ModelExportError, match="at least one principal or issuer"):
        Access(tmp_path)


def test_the_documented_sections_are_an_access_file(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "security.md").read_text()
    blocks = re.findall(r"```yaml\n((?:issuers|projects):.*?)```", page, re.DOTALL)
    (tmp_path / "access.yaml").write_text("".join(blocks))
    loaded = load_access(tmp_path / "access.yaml")
    assert [issuer.name for issuer in loaded.issuers] == ["keycloak", "cluster"]
    pod = {"kubernetes.io": {"namespace": "slipway", "serviceaccount": {"name": "slipway-worker"}}}
    assert loaded.issuers[1].rules[0].fits(pod)
    assert set(loaded.projects) == {"*", "research"}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
_NAMES = st.sampled_from(["iss", "aud", "sub", "exp", "nbf", "iat", "jti", "groups", "kubernetes.io", "email"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(claims=st.dictionaries(_NAMES, _JSON, max_size=6))
async def test_any_claims_end_as_a_principal_or_a_refusal(
    access: Access, issuer: OidcIssuer, claims: dict[str, Any]
) -> None:
    try:
        principal = await access.identify(issuer.token(**claims))
    except ServiceError as error:
        assert error.reason in {"UNAUTHENTICATED", "PERMISSION_DENIED"}
    else:
        assert principal.name.startswith("id:")

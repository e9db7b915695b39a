"""Who may ask, and as whom: tenants and their API keys (DESIGN §4.2, §4.3; I6). They may change while requests run.

A key is a long random string made by `headrace key`. Only its sha256 is configured, so neither the configuration nor
anything made from it can be used to ask. The tenant decides the salt of the block keys: what one tenant's prompts left
in a prefix cache is found by nobody else, in any answer's time or text.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.core.access import TenantSettings
from cluster.core.errors import Unauthenticated
from cluster.quotas import NO_LIMITS, Quota

_BEARER = "bearer "
_MAX_KEY_CHARACTERS = 512
_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Tenant:
    """One of those who share the cluster. `operator`: its keys may look at the whole of it."""

    name: str
    quota: Quota = NO_LIMITS
    salt: bytes = b""
    operator: bool = False


ANONYMOUS = Tenant("", operator=True)
"""Everybody, where no tenant is configured."""


class Tenants:
    """Those there are now. `secret`, the cluster's, keeps salts from being guessed.

    `locked`: calls need a key though there is no tenant at all; with one they always do.
    """

    def __init__(self, settings: Mapping[str, TenantSettings], secret: str | None, *, locked: bool = False) -> None:
        self._own = secrets.token_bytes(32)
        self._secret = secret
        self._locked = locked
        self._by_tag: dict[bytes, tuple[bytes, Tenant]] = {}
        self.weights: dict[str, float] = {}
        self.refused = 0  # calls
        self.replace(settings)

    def replace(self, settings: Mapping[str, TenantSettings]) -> None:
        """From now on these and no others. What runs goes on; `weights` stays the same object."""
        self.prepared(settings)()

    def prepared(self, settings: Mapping[str, TenantSettings]) -> Callable[[], None]:
        """All the work of `replace`, which may be a thread's; to call what it returns is the change itself."""
        by_tag = {}
        for name, one in settings.items():
            quota = Quota(one.requests_per_minute, one.tokens_per_minute, one.concurrency)
            tenant = Tenant(name, quota, _salt(name, self._secret), one.operator)
            for key in one.keys:
                digest = bytes.fromhex(key)
                by_tag[self._tag(digest)] = (digest, tenant)
        weights = {name: one.weight for name, one in settings.items()}

        def take() -> None:
            self._by_tag = by_tag
            self.weights.clear()
            self.weights.update(weights)

        return take

    @property
    def configured(self) -> bool:
        """Whether calls need a key."""
        return self._locked or bool(self.weights)

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant whose key is in this `authorization` value. Raises Unauthenticated; no message holds the key."""
        if not self.configured:
            return ANONYMOUS
        given = authorization or ""
        tenant = self._of_key(given[len(_BEARER) :].strip()) if _is_bearer(given) else None
        if tenant is not None:
            return tenant
        self.refused += 1
        if authorization is None:
            raise _refusal("no API key was given; it goes into the header `Authorization: Bearer <key>`")
        raise _refusal("the API key is not valid here")

    def _of_key(self, key: str) -> Tenant | None:
        """Found by a tag under a secret of this process, so that no delay tells how near a guess was."""
        if len(key) > _MAX_KEY_CHARACTERS:
            return None
        given = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        expected, tenant = self._by_tag.get(self._tag(given), (bytes(len(given)), None))
        return tenant if hmac.compare_digest(given, expected) else None

    def _tag(self, digest: bytes) -> bytes:
        return hmac.digest(self._own, digest, "sha256")


def _is_bearer(authorization: str) -> bool:
    return authorization[: len(_BEARER)].lower() == _BEARER


def _refusal(message: str) -> Unauthenticated:
    return Unauthenticated(message, code="invalid_api_key")


def _salt(name: str, secret: str | None) -> bytes:
    """The same on every router and after every restart, as long as the cluster's secret is."""
    key = hashlib.sha256((secret or "").encode()).digest()
    return hashlib.blake2b(name.encode(), digest_size=_SALT_BYTES, key=key, person=b"headrace-tenant").digest()

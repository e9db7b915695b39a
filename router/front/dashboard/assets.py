"""The page: plain files beside this one, read once. Nothing in them comes from a request, and nothing from elsewhere.

The Content-Security-Policy allows what these files need and no more: no inline script or style, no other host, no
frame, no form that goes anywhere; and no string becomes markup (trusted types). So even a name that somebody chose
maliciously can only ever be shown as text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from router.front.dashboard.paths import FILES

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is served."""

    body: bytes
    media_type: str


def load_assets() -> Mapping[str, Asset]:
    """Path -> file, all of them; the page itself is at /dashboard."""
    return {path: Asset((_FOLDER / name).read_bytes(), _TYPES[Path(name).suffix]) for path, name in FILES.items()}

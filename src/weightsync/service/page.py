"""The status page: one HTML file without anything from elsewhere, allowed to run only its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

__all__ = ["HEADERS", "HTML"]

HTML = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")


def _hashes(tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found)


HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""The page shows names that agents chose: it inserts them as text, and nothing but its own script may run."""

"""The status page: one HTML document without anything from elsewhere, allowed to run only its own scripts."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from weightsync.protocol.tokens import is_loopback

_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9.-]+))(?::[0-9]{1,5})?")
"""A name or address without user, zone or anything else that a browser does not send."""
_FOLDER = resources.files(__package__)


def _assembled() -> str:
    """Return the page with the vendored chart library (uPlot, MIT licence) in it."""
    html = _FOLDER.joinpath("page.html").read_text(encoding="utf-8")
    for name in ("uPlot.min.css", "uPlot.iife.min.js"):
        html = html.replace(f"/* {name} */", _FOLDER.joinpath("vendor", name).read_text(encoding="utf-8"))
    return html


HTML = _assembled()


def _hashes(tag: str) -> str:
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in blocks)


HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""The page shows names that agents chose: it inserts them as text, and nothing but its own script may run."""


def is_own_name(host: str, listening: str) -> bool:
    """Whether a browser that sends this ``Host`` asked for this machine, as far as a coordinator on loopback can know.

    A page elsewhere can have its own name resolve to 127.0.0.1, and for the browser what is served under that name belongs to it.
    A coordinator that listens on more than loopback has names that it does not know.
    """
    if not is_loopback(listening):
        return True
    name = _HOST.fullmatch(host)
    return name is not None and is_loopback(name["v6"] or name["name"])

"""Extension of Griffe: what docstrings write in reStructuredText, as Markdown."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

__all__ = ["RestructuredText"]

_ROLE = re.compile(r":\w+:`(~?)([\w.]+)`")
_LITERAL = re.compile(r"^(.*)::$", re.MULTILINE)


def _code(match: re.Match[str]) -> str:
    return f"`{match[2].rpartition('.')[2] if match[1] else match[2]}`"


def _before_code(match: re.Match[str]) -> str:
    return f"{match[1]}:" if match[1].strip() else ""


class RestructuredText(Extension):  # type: ignore[misc]  # Griffe is not followed: pyproject.toml
    """Shows the target of a role as code, and what follows a double colon as an example."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _LITERAL.sub(_before_code, _ROLE.sub(_code, obj.docstring.value))

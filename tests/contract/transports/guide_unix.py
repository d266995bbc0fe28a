"""The code of the guide "write a transport", as a module: importable here and in the processes that the contract starts."""

from __future__ import annotations

import re
from pathlib import Path

__all__: list[str] = []

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "write-a-transport.md"
_BLOCKS = re.findall(r"^```python\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
exec(compile("\n".join(_BLOCKS), _PAGE.name, "exec", dont_inherit=True))

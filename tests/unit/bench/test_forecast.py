"""The forecast: its bytes and pieces are the planner's, its figures have sources, and its answers stay within stated errors."""

from __future__ import annotations

import json
import statistics
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.planning.simulation import ranks_of, source_bytes, targets_of
from tools.reference import forecast_of
from typer.testing import CliRunner, Result

from weightsync.cli.commands import EXIT_CONFIGURATION
from weightsync.cli.main import app
from weightsync.errors import ConfigurationError
from weightsync.model import Layout, Manifest
from weightsync.planning.plan import plan_transfer
from weightsync.transports.registry import BUILT_IN, transport
from weightsync_bench.forecast import figures as module
from weightsync_bench.forecast.figures import calibration_of, figures, predictions
from weightsync_bench.forecast.mesh import Mesh, ShapeTable, traffic_between
from weightsync_bench.shapes import CONFIGURATIONS, read_configuration, tensor_counts, tensors_of
from weightsync_bench.sharding import expert_parallel, fsdp, tensor_parallel

Sharding = Callable[[Manifest, int], list[Layout]]
SMALL = {**CONFIGURATIONS["qwen3-30b-a3b"], "num_hidden_layers": 2, "num_experts": 16}
LATENT = {**CONFIGURATIONS["kimi-k2"], "num_hidden_layers": 2, "num_experts": 16}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.mark.parametrize("model", CONFIGURATIONS)
def test_counted_shapes_add_up_to_all_tensors(model: str) -> None:
    specs, shapes = tensors_of(CONFIGURATIONS[model]), ShapeTable(tensor_counts(CONFIGURATIONS[model]))
    assert (len(shapes), shapes.nbytes) == (len(specs), sum(spec.nbytes for spec in specs))


@pytest.mark.parametrize("config", [SMALL, LATENT], ids=["grouped query", "latent"])
@pytest.mark.parametrize(
    ("source", "sources", "target", "targets"),
    [
        ("fsdp=8", fsdp, "tp=4", tensor_parallel),
        ("fsdp=4", fsdp, "tp=4", tensor_parallel),
        ("fsdp=8", fsdp, "tp=4,ep=4", expert_parallel),
        ("tp=2", tensor_parallel, "tp=4", tensor_parallel),
        ("tp=4", tensor_parallel, "tp=2,ep=2", expert_parallel),
    ],
)
def test_bytes_and_pieces_are_the_planners(
    config: dict[str, Any], source: str, sources: Sharding, target: str, targets: Sharding
) -> None:
    manifest, meshes = Manifest(tensors_of(config)), (Mesh.parse(source), Mesh.parse(target))
    held = {f"s{rank}": layout for rank, layout in enumerate(sources(manifest, meshes[0].ranks))}
    wanted = {f"t{rank}": layout for rank, layout in enumerate(targets(manifest, meshes[1].ranks))}
    plan = plan_transfer(manifest, ranks_of(held), targets_of(wanted))
    traffic = traffic_between(ShapeTable(tensor_counts(config)), *meshes)
    assert traffic.replica_pieces == plan.count
    assert traffic.received == statistics.fmean(plan.nbytes(name) for name in wanted)
    assert traffic.sent == pytest.approx(statistics.fmean(source_bytes(plan).values()))
    assert traffic.owned == statistics.fmean(layout.nbytes(manifest) for layout in held.values())


def test_every_built_in_transport_uses_links_by_its_traits() -> None:
    assert {links.name for links in figures().transport} == {*BUILT_IN, "nixl"} - {"store"}, "joining from a store is not forecast"
    for links in figures().transport:
        traits = transport(links.name).traits
        assert (links.reach, links.shared) == (traits.reach, traits.shared_fate), links.name
        assert links.memory == ("cuda" if "cuda" in traits.writes else "host"), links.name
        assert links.memory == "cuda" or figures()[links.core or "pcie"] > 0


def test_every_figure_has_a_source_and_a_row_that_is_left_out_a_reason() -> None:
    assert all(figure.source for figure in figures().measured.values())
    assert all(row.citation and row.what for row in figures().published)
    rows = {row.number for row in figures().published if not row.left_out}
    assert rows == {1, 2, 3, 4, 7, 8, 11, 12, 15, 16, 17, 18, 21, 24, 25}
    assert {row.number for row in figures().published if row.left_out} == {10, 20, 22, 23}
    own = {"docs/benchmarks/gpu-rounds.md", "docs/benchmarks/control.md", "docs/benchmarks/cpu-transports.md"}
    root = Path(__file__).parents[3]
    assert all((root / name).is_file() for name in own)


@pytest.mark.parametrize("scheme", ["sharded", "gathered", "broadcast", "direct"])
def test_rows_with_even_numbers_do_not_calibrate(scheme: module.Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = msgspec.structs.replace(figures(), published=tuple(row for row in figures().published if row.number % 2))
    before = calibration_of(scheme)
    monkeypatch.setattr(module, "figures", lambda: odd)
    after = calibration_of.__wrapped__(scheme)
    assert (after.factor, after.tensor, after.rows) == (before.factor, before.tensor, before.rows)


def test_half_of_the_rows_that_test_are_within_forty_percent() -> None:
    errors = [abs(one.error) for one in predictions() if not one.calibrates]
    assert len(errors) >= 8
    assert statistics.median(errors) < 0.4


def test_rounds_of_this_project_are_forecast() -> None:
    reads, pauses = [], []
    for row in figures().round:
        forecast = forecast_of(row.model, row.source, row.target, placement=row.placement)
        chosen = next(one for one in forecast.transports if one.transport == row.transport)
        reads.append(abs(chosen.stages["transfer"] / row.read - 1))
        pauses.append(abs(chosen.pause / row.pause - 1))
    assert max(reads) < 0.2
    assert statistics.median(pauses) < 0.1


def test_a_trillion_parameters_from_256_to_16_replicas_of_16() -> None:
    done = run("kimi-k2", "--source", "pp=8,ep=32", "--target", "tp=16,replicas=16", "--nic", "400", "--json")
    answer = json.loads(done.stdout)
    assert answer["refit"]["received"] == pytest.approx(130.3e9, rel=0.01)
    best = next(one for one in answer["transports"] if one["transport"] == answer["best"])
    floor = max(link["nbytes"] / link["rate"] for link in best["links"])
    assert floor == pytest.approx(130.3 / 50, rel=0.01)
    assert floor < best["pause"] < 3 * floor
    assert answer["changes"][0]["what"].startswith("publish float8_e4m3fn")
    assert not answer["refused"]


def test_a_trainer_that_cuts_across_the_engines_is_told_to_keep_experts_whole() -> None:
    forecast = forecast_of("kimi-k2", "fsdp=256", "tp=16,replicas=16")
    assert "refuses a plan of 108,356,096 pieces" in forecast.refused
    assert forecast.changes[0].what.startswith("whole experts at the trainer")
    command = ("kimi-k2", "--source", "fsdp=256", "--target", "tp=16,replicas=16")
    short, shown = run(*command).stdout, run(*command, "--details").stdout
    assert short.splitlines()[0] == shown.splitlines()[0]
    assert "what to change first" in short
    assert [title for title in ("seconds by stage", "extra memory", "seconds by link") if title in short] == []
    assert "108,356,096" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


@pytest.mark.parametrize("change", [{"nic": 800.0}, {"dtype": "float8_e4m3fn"}])
def test_faster_links_and_fewer_bytes_are_never_slower(change: dict[str, Any]) -> None:
    for model, source, target in (("kimi-k2", "pp=8,ep=32", "tp=16,replicas=16"), ("qwen3-4b", "fsdp=8", "tp=2,replicas=8")):
        before, after = forecast_of(model, source, target), forecast_of(model, source, target, **change)
        for one, other in zip(before.transports, after.transports, strict=True):
            assert other.unusable or other.pause <= one.pause


def test_replicas_that_share_a_broadcast_cost_the_trainer_one_copy() -> None:
    forecast = forecast_of("qwen3-8b", "fsdp=8", "tp=8,replicas=8")
    out = {one.transport: one.links[0].nbytes for one in forecast.transports if one.transport in ("nccl", "nixl")}
    assert out["nixl"] == pytest.approx(8 * out["nccl"])
    assert forecast.best == "nccl"


def test_ranks_of_one_gpu_read_their_own_memory() -> None:
    forecast = forecast_of("qwen3-8b", "tp=2", "tp=2", placement="colocated")
    (chosen,) = (one for one in forecast.transports if one.transport == "cuda_ipc")
    assert {link.name for link in chosen.links} == {"engine GPU: own memory"}


def test_the_picture_has_a_bar_for_each_link_and_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "refit.svg"
    assert run("qwen3-8b", "--source", "fsdp=8", "--target", "tp=4", "--svg", str(path)).exit_code == 0
    text = path.read_text()
    root = ET.fromstring(text)
    shown = "".join(root.itertext()).replace("\xa0", " ")
    assert all(name in shown for name in ("nixl", "nccl", "tcp", "trainer GPU: NIC out", "█"))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert run("qwen3-8b", "--svg", str(tmp_path / "none" / "refit.svg")).exit_code == EXIT_CONFIGURATION


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("qwen3-8b", "--source", "fsdp=0"), "fsdp=0: sizes must be at least 1"),
        (("qwen3-8b", "--source", "zero=8"), "give a mesh as"),
        (("qwen3-8b", "--source", "tp=8,tp=8"), "give a mesh as"),
        (("qwen3-8b", "--target", "tp=3,ep=2"), "one must divide the other"),
        (("qwen3-8b", "--target", "replicas=99999999"), "the ranks at most"),
        (("qwen3-8b", "--target", "tp=7"), "engines refuse tp=7 for 32 attention heads and 8 of keys and values"),
        (("qwen3-30b-a3b", "--target", "tp=64"), "engines refuse tp=64 for 32 attention heads"),
        (("qwen3-8b", "--dtype", "complex"), "unknown dtype"),
        (("qwen3-8b", "--nic", "0"), "more than 0"),
        (("qwen3-8b", "--nic", "nan"), "more than 0"),
        (("nonsense",), "unknown model"),
    ],
)
def test_a_wrong_argument_is_one_clear_line(arguments: tuple[str, ...], what: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (EXIT_CONFIGURATION, "")
    assert what in done.stderr.replace("\n", " ")


def test_a_configuration_file_gives_the_same_as_the_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGURATIONS["deepseek-v3"], "n_routed_experts": 256, "num_experts": None, "rope_theta": 1e4}))
    assert read_configuration(str(path))
    assert run(str(path), "--json").stdout == run("deepseek-v3", "--json").stdout


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"hidden_size": "large"}', '{"hidden_size": 1e30}', '{"text_config": {"hidden_size": -1}}', "\xff"]
)
def test_a_configuration_that_says_no_shapes_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigurationError, match=r"config\.json|shapes"):
        tensor_counts(read_configuration(str(path)))


def test_a_configuration_of_too_many_tensors_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="more than"):
        tensors_of({**SMALL, "num_hidden_layers": 1 << 20})

"""Rounds with quantized weights: every format into a module that serves it, from one rank and from two whose shards cut blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.integration.rounds.quantized_ranks import FORMATS, model, values
from tests.integration.rounds.test_rounds import Joined
from tests.processes import ranks
from tests.unit.tensors.quantized_references import NAMES, reference
from torch import nn

from weightsync import Receiver, Trainer
from weightsync.config import ServerSettings, Timeouts
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError, CoordinatorUnreachable, DeadlineExceeded, ManifestMismatch
from weightsync.server.server import BackgroundServer


@pytest.fixture
def server() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=0)) as running:
        yield running


@pytest.fixture
def joined(server: BackgroundServer) -> Iterator[Joined]:
    with ExitStack() as owned:
        yield Joined(server, owned)


class Served(nn.Module):
    """A module that holds tensors of a quantized checkpoint."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(leaf, nn.Parameter(torch.zeros_like(tensor), requires_grad=False))


def quantized(module: nn.Module, formats: dict[str, str], fused: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """What an engine holds of ``module``, by the references."""
    plain = {name: value.detach() for name, value in module.state_dict().items()}
    tensors = {name: value for name, value in plain.items() if name not in formats}
    for name, kind in formats.items():
        members = [plain[other] for other in (fused if name in fused else (name,))]
        largest = torch.stack([member.abs().max() for member in members]).max()
        parts = (name.removesuffix("weight") + part for part in NAMES[kind])
        tensors |= dict(zip(parts, reference(kind, plain[name], largest), strict=True))
    return tensors


def assert_serves(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    held = dict(module.named_parameters())
    assert sorted(held) == sorted(expected)
    for name, value in expected.items():
        raw = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (held[name], value))
        assert torch.equal(*raw), name


@pytest.mark.parametrize("delivery", ["direct", "streamed"])
@pytest.mark.parametrize("name", NAMES)
def test_each_format_arrives_as_its_reference(joined: Joined, name: str, delivery: str) -> None:
    torch.manual_seed(3)
    matrix = nn.Linear(256, 150)
    source = nn.Sequential(matrix, nn.LayerNorm(150)).bfloat16()
    target = Served(quantized(source, {"0.weight": name}))
    trainer = joined.trainer(source, quantize={"0.weight": name})
    joined.engine(ModuleAdapter(target), delivery=delivery, bucket_bytes=4000)
    for number in (1, 2):
        with torch.no_grad():
            matrix.weight.mul_(-1.5 * number)
        (replica,) = trainer.publish(number, timeout=20).replicas
        assert (replica.version, replica.delivery, replica.verified) == (number, delivery, "installed")
        assert_serves(target, quantized(source, {"0.weight": name}))


def test_masters_stay_as_they_are_and_move(joined: Joined) -> None:
    source = nn.Linear(128, 128, bias=False)
    target = Served(quantized(nn.Linear(128, 128, bias=False).bfloat16(), {"weight": "fp8-block"}))
    trainer = joined.trainer(source, dtype=torch.bfloat16, quantize={"weight": "fp8-block"})
    joined.engine(ModuleAdapter(target))
    for number in (1, 2, 3):
        source.weight.data = torch.randn(128, 128)
        before = source.weight.detach().clone()
        trainer.publish_async(number, timeout=20).result(20)
        assert torch.equal(source.weight, before)
        assert_serves(target, _of(before))


def _of(masters: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(NAMES["fp8-block"], reference("fp8-block", masters.bfloat16()), strict=True))


def test_only_changed_words_of_quantized_weights_move(joined: Joined) -> None:
    torch.manual_seed(4)
    source = nn.Linear(256, 256, bias=False).bfloat16()
    target = Served(quantized(source, {"weight": "fp8-block"}))
    trainer = joined.trainer(source, deltas=True, quantize={"weight": "fp8-block"})
    joined.engine(ModuleAdapter(target))
    trainer.publish(1, timeout=20)
    with torch.no_grad():
        source.weight[3, 7] = 0.01
    (replica,) = trainer.publish(2, timeout=20).replicas
    assert (replica.base, replica.nbytes < 3000) == (1, True)
    assert_serves(target, quantized(source, {"weight": "fp8-block"}))


@pytest.mark.parametrize("name", ["fp8-block", "mxfp4", "int4-group128"])
def test_inf_fails_the_publication_while_replicas_serve(joined: Joined, name: str) -> None:
    source = nn.Linear(256, 64, bias=False).bfloat16()
    target = Served(quantized(source, {"weight": name}))
    adapter = ModuleAdapter(target)
    trainer = joined.trainer(source, quantize={"weight": name})
    joined.engine(adapter)
    trainer.publish(1, timeout=20)
    before = quantized(source, {"weight": name})
    with torch.no_grad():
        source.weight[5, 5] = float("inf")
    with pytest.raises(ConfigurationError, match="weight holds Inf or NaN"):
        trainer.publish(2, timeout=20)
    with adapter.in_use(timeout=1) as version:
        assert version is not None
        assert version.number == 1
        assert_serves(target, before)
    with torch.no_grad():
        source.weight[5, 5] = 1
    trainer.publish(3, timeout=20)
    assert_serves(target, quantized(source, {"weight": name}))


@pytest.mark.parametrize("name", NAMES)
def test_what_an_engine_holds_is_published(joined: Joined, name: str) -> None:
    torch.manual_seed(5)
    source = nn.Sequential(nn.Linear(256, 150), nn.LayerNorm(150), nn.Linear(150, 8)).bfloat16()
    target = Served(quantized(source, {"0.weight": name}))
    joined.engine(ModuleAdapter(target))
    trainer = joined.trainer(source, quantize="as-served")
    assert trainer.publish(timeout=20).replicas[0].verified == "installed"
    assert_serves(target, quantized(source, {"0.weight": name}))


def test_an_engine_without_quantized_weights_gets_them_as_they_are(joined: Joined, caplog: pytest.LogCaptureFixture) -> None:
    source, target = nn.Linear(128, 128), nn.Linear(128, 128)
    joined.engine(ModuleAdapter(target))
    with caplog.at_level("INFO"):
        joined.trainer(source, quantize="as-served").publish(timeout=20)
    assert_serves(target, quantized(source, {}))
    assert "0 of 2 tensors are published quantized, because replica replica-0 holds no quantized ones" in caplog.text


def test_a_trainer_waits_for_the_first_engine_and_a_receiver_is_none(joined: Joined) -> None:
    source = nn.Linear(128, 128, bias=False).bfloat16()
    target = Served(quantized(source, {"weight": "fp8-block"}))
    with (
        Receiver("other", joined.server.url, token=joined.server.token),
        pytest.raises(DeadlineExceeded, match="waited 1 s for a whole replica with tensors; there are: other"),
    ):
        joined.trainer(source, quantize="as-served", timeouts=Timeouts(replicas=0.5))
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(joined.trainer, source, quantize="as-served")
        with pytest.raises(TimeoutError):
            made.result(0.3)
        joined.engine(ModuleAdapter(target))
        made.result(20).publish(timeout=20)
    assert_serves(target, quantized(source, {"weight": "fp8-block"}))


def test_engines_that_hold_different_formats_are_named(joined: Joined) -> None:
    source = nn.Linear(128, 128, bias=False).bfloat16()
    for replica, name in (("a", "fp8-block"), ("b", "fp8-channel")):
        joined.engine(ModuleAdapter(Served(quantized(source, {"weight": name}))), replica)
    with pytest.raises(ManifestMismatch, match=r"replica b, unlike replica a,(?s:.*)unexpected: weight_scale"):
        joined.trainer(source, quantize="as-served")


def test_an_engine_in_no_known_format_is_an_error_before_the_trainer_joins(joined: Joined) -> None:
    awq = {"qweight": torch.zeros(128, 16, dtype=torch.int32), "qzeros": torch.zeros(1, 16, dtype=torch.int32)}
    joined.engine(ModuleAdapter(Served({f"0.{name}": value for name, value in awq.items()})))
    with pytest.raises(ConfigurationError, match=r"replica replica-0 holds 0\.weight .* in no format .*: 0\.qweight \(int32 \["):
        joined.trainer(nn.Sequential(nn.Linear(128, 128, bias=False)), quantize="as-served")


def test_what_is_served_is_asked_of_a_coordinator_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTSYNC_COORDINATOR", raising=False)
    with pytest.raises(CoordinatorUnreachable):
        Trainer(nn.Linear(8, 8), quantize="as-served", token="0" * 64)


def test_a_quantization_config_and_a_checkpoint_with_one(joined: Joined, tmp_path: Path) -> None:
    source = nn.ModuleDict({"q_proj": nn.Linear(256, 64), "lm_head": nn.Linear(64, 8)}).bfloat16()
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    for place, quantize in enumerate((config, tmp_path)):
        target = Served(quantized(source, {"q_proj.weight": "fp8-block"}))
        with (
            joined.trainer(source, quantize=quantize) as trainer,
            joined.engine(ModuleAdapter(target), f"replica-{place}"),
        ):
            trainer.publish(timeout=20)
        assert_serves(target, quantized(source, {"q_proj.weight": "fp8-block"}))
    with pytest.raises(ConfigurationError, match="quant_method 'awq': its scales depend"):
        joined.trainer(source, quantize={"quant_method": "awq"})


def test_an_engine_that_holds_another_format_is_refused_by_name(joined: Joined) -> None:
    source = nn.Linear(256, 64, bias=False).bfloat16()
    joined.trainer(source, quantize={"weight": "fp8-block"})
    tensors = quantized(source, {"weight": "fp8-block"}) | {"input_scale": torch.ones(1)}
    with pytest.raises(ManifestMismatch, match="unexpected: input_scale"):
        joined.engine(ModuleAdapter(Served(tensors)))
    with pytest.raises(ManifestMismatch, match="missing: weight_scale_inv"):
        joined.engine(ModuleAdapter(Served(quantized(source, {"weight": "fp8-channel"}))), replica="other")


def test_what_cannot_be_quantized_is_refused_before_it_joins(joined: Joined) -> None:
    for state, formats, words in (
        (nn.LayerNorm(8), {"weight": "fp8-block"}, "weight cannot be quantized"),
        (nn.Linear(8, 8), {"wait": "fp8-block"}, "no tensor is left for the pattern 'wait'"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            joined.trainer(state, quantize=formats)
    with pytest.raises(ConfigurationError, match=r"quantize= needs torch.distributed over the trainer's 2 ranks"):
        joined.trainer(nn.Linear(8, 8), quantize={"weight": "fp8-block"}, rank=0, world_size=2)


@pytest.mark.timeout(180)
def test_two_ranks_whose_shards_cut_blocks(joined: Joined, tmp_path: Path) -> None:
    whole = model()
    fused = tuple(name for name in FORMATS if "_proj" in name)

    def expected(number: int) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                parameter.copy_(values(name, tuple(parameter.shape), number))
        return quantized(whole, FORMATS, fused)

    target = Served(expected(1))
    adapter = ModuleAdapter(target)
    joined.engine(adapter)
    arguments = ("tests.integration.rounds.quantized_ranks", tmp_path / "store", joined.server.url)
    with ranks(2, *arguments, environment={"WEIGHTSYNC_TOKEN": joined.server.token}) as processes:
        outcomes = [json.loads(process.line(120)) for process in processes]
        for first, second, third, fourth, fifth in outcomes:
            assert (first, second, fifth) == ("1", "2", "5")
            assert "0.weight holds Inf or NaN" in third
            assert "failed on purpose" in fourth or "gave up this version" in fourth
        with adapter.in_use() as version:
            assert version is not None
            assert version.number == 5
            assert_serves(target, expected(5))
        assert [process.end(30) for process in reversed(processes)] == [0, 0]


@pytest.mark.timeout(180)
def test_ranks_meet_again_after_a_version_of_which_one_never_heard(tmp_path: Path) -> None:
    with ranks(2, "tests.integration.rounds.maxima_ranks", tmp_path / "store") as processes:
        outcomes = [json.loads(process.output(120)) for process in processes]
    both: dict[str, float | str] = {"1": 1.0, "3": 3.0, "4": 4.0, "6": 6.0, "8": "Placed", "10": "Placed"}
    assert outcomes == [{**both, "5": "Aborted", "7": "Aborted"}, {**both, "9": "Aborted"}]

"""NeMo-RL's own synchronizer, worker groups and mixins in Ray, with weightsync by its line of configuration."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import os
import pickle
import re
import secrets
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_rl", reason="NeMo-RL is not installed here")

import nemo_rl
import numpy as np
import ray
from benchmarks import gpu_nemo_rl, gpu_verl
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY, PY_EXECUTABLES
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine
from nemo_rl.utils.config import load_config_with_inheritance
from nemo_rl.weight_sync import ipc_weight_synchronizer
from nemo_rl.weight_sync.checkpoint_engine_config import checkpoint_engine_refit_config
from nemo_rl.weight_sync.factory import create_weight_synchronizer
from omegaconf import OmegaConf
from ray.exceptions import RayActorError, RayTaskError
from tests.integration.called_module import make_model
from tests.integration.nemo_rl.refit_contract import POLICIES, SECONDS, WORKERS, RefitContract, RefitProtocol, expected, raised
from transformers import AutoConfig

from weightsync.config import Address, ClientSettings
from weightsync.errors import ConfigurationError, RoundFailed
from weightsync.integrations.nemo_rl import colocated, enable
from weightsync.integrations.nemo_rl.engine import NAME
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.tokens import find_token
from weightsync.server.client import Client

pytestmark = [
    pytest.mark.nemo_rl,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # NeMo-RL's, Ray's and those of what they import
]

ROOT = Path(__file__).resolve().parents[3]
ACTORS = "tests.integration.nemo_rl.nemo_rl_actors"
PAGE = ROOT / "docs/integrations/nemo_rl.md"
CONFIGS = Path(nemo_rl.__file__).parents[1] / "examples/configs"
BENCHMARK: Any = gpu_nemo_rl  # untyped
WRITER: Any = gpu_verl


@contextmanager
def cluster(folder: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    for name in ("Policy", "ShardedPolicy", "Generation", "AsyncGeneration"):
        ACTOR_ENVIRONMENT_REGISTRY[f"{ACTORS}.{name}"] = PY_EXECUTABLES.SYSTEM
    try:
        ray.init(
            num_cpus=16, include_dashboard=False, log_to_driver="NEMO_RL_TEST_LOG" in os.environ, logging_level="error",
            object_store_memory=80 << 20, _temp_dir=folder,
        )  # fmt: skip
        yield
    finally:
        ray.shutdown()
        for name in ("Policy", "ShardedPolicy", "Generation", "AsyncGeneration"):
            del ACTOR_ENVIRONMENT_REGISTRY[f"{ACTORS}.{name}"]
        os.environ.clear()
        os.environ |= before


def group(actor: str, sizes: dict[str, int], *arguments: Any) -> Any:
    """NeMo-RL's own group of workers, without GPUs."""
    count = int(np.prod(list(sizes.values())))
    sharding = NamedSharding(layout=np.arange(count).reshape(list(sizes.values())), names=list(sizes))
    bundles = RayVirtualCluster([count], use_gpus=False, name=f"{actor}-{secrets.token_hex(2)}")
    builder = RayWorkerBuilder(f"{ACTORS}.{actor}", *arguments)
    return RayWorkerGroup(bundles, builder, name_prefix=bundles.name, sharding_annotations=sharding)


class RayRefits:
    """What NeMo-RL's trainer has: two groups of workers, and the synchronizer that its factory makes from a configuration."""

    def __init__(self, generation: dict[str, Any], model: str = "") -> None:
        asynchronous = generation["vllm_cfg"]["async_engine"]
        policy = ("ShardedPolicy", {"model_name": model, "generation": generation}) if model else ("Policy",)
        policies = group(policy[0], {"data_parallel": POLICIES}, *policy[1:])
        self.policy = types.SimpleNamespace(worker_group=policies, prepare_refit_info=dict)
        sizes = {"data_parallel": WORKERS, "pipeline_parallel": 1, "tensor_parallel": 1}
        self.generation = types.SimpleNamespace(
            worker_group=group("AsyncGeneration" if asynchronous else "Generation", sizes, *filter(None, [model])),
            prepare_refit_info=lambda info: None, dp_size=WORKERS, cfg=generation,
        )  # fmt: skip
        self.policies, self.workers = self.policy.worker_group.workers, self.generation.worker_group.workers
        self.make_synchronizer()

    def make_synchronizer(self) -> None:
        self.synchronizer = create_weight_synchronizer(self.policy, self.generation, "vllm", colocated=False)
        self.synchronizer.init_communicator()

    def sync(self, seed: int) -> None:
        self._change(seed)
        self.synchronizer.sync_weights()
        assert not self.synchronizer.is_stale

    def fail(self, seed: int) -> tuple[list[BaseException], list[BaseException]]:
        """The calls of ``sync_weights()``, which raises one error only."""
        self._change(seed)
        asked = self.synchronizer._run_policy("send_weights_via_checkpoint_engine", kv_scales=None)
        asked += self.synchronizer._run_generation("update_weights_from_checkpoint_engine")
        errors: list[BaseException | None] = []
        for ref in asked:
            try:
                ray.get(ref, timeout=SECONDS * 2)
                errors.append(None)
            except (RayTaskError, RayActorError) as error:
                errors.append(error.cause if isinstance(error, RayTaskError) else error)
        return raised(errors[:POLICIES]), raised(errors[POLICIES:])

    def _change(self, seed: int) -> None:
        ray.get([policy.set.remote(seed=seed) for policy in self.policies])
        ray.get([worker.begin.remote() for worker in self.workers])

    def holds(self) -> bool:
        """Whether each vLLM worker's model equals the policy's."""
        whole = ray.get([policy.whole.remote() for policy in self.policies])[0]
        return bool(ray.get([worker.holds.remote() for worker in self.workers]) == [whole] * WORKERS)

    def status(self) -> Any:
        asked = self.policies[0].checkpoint_engine_rpc.remote("prepare_checkpoint_engine")
        with Client(ClientSettings.load(coordinator=ray.get(asked)["coordinator"])) as client:
            return client.status()

    def last_round(self) -> RoundResult:
        result: RoundResult = self.status().rounds[-1]
        return result

    def set_faults(self, policies: Sequence[str], workers: Sequence[str]) -> None:
        ray.get([policy.set.remote(fault=fault) for policy, fault in zip(self.policies, policies, strict=True)])
        ray.get([worker.set.remote(fault=fault) for worker, fault in zip(self.workers, workers, strict=True)])

    def loaded(self) -> list[dict[str, str]]:
        return ray.get([worker.loaded.remote() for worker in self.workers])  # type: ignore[no-any-return]

    def walked(self) -> list[bool]:
        return ray.get([policy.walked.remote() for policy in self.policies])  # type: ignore[no-any-return]

    def shutdown(self) -> None:
        self.synchronizer.shutdown()

    def kill(self) -> None:
        for worker in [*self.policies, *self.workers]:
            ray.kill(worker)
        for side in (self.policy, self.generation):
            side.worker_group.cluster.shutdown()


def generation_config(folder: Path, *, colocated: bool = False, async_engine: bool = False, **options: Any) -> dict[str, Any]:
    """The example of the page as NeMo-RL reads it, on top of its own configuration, and ``options`` of a test."""
    (text,) = re.findall(r"^```yaml\n(defaults: .*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    path = folder / "grpo_math_1B_weightsync.yaml"
    path.write_text(text)
    config: Any = OmegaConf.to_container(load_config_with_inheritance(path, CONFIGS))
    generation: dict[str, Any] = config["policy"]["generation"]
    assert (generation["backend"], generation["colocated"]["enabled"]) == ("vllm", False)
    assert (generation["refit_transport"], generation["refit_cfg"][NAME]) == (NAME, {"dtype": "bfloat16"})
    generation["vllm_cfg"]["async_engine"] = async_engine
    generation["refit_cfg"][NAME] = {"timeout": SECONDS, **options}
    if colocated:  # NeMo-RL then refuses a transport of this name
        generation |= {"refit_transport": None, "refit_cfg": None}
    return generation


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="n-", ignore_cleanup_errors=True) as name, cluster(name):
        yield Path(name)


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return make_model(folder / "model")


@pytest.mark.parametrize("async_engine", [False, True])
def test_shards_of_an_fsdp2_policy_reach_the_parameters_of_each_vllm_worker(folder: Path, model: str, async_engine: bool) -> None:
    made = RayRefits(generation_config(folder, async_engine=async_engine), model)
    try:
        for seed in range(2):
            made.sync(seed)
            assert made.holds()
        assert made.walked() == [False] * POLICIES, "nothing is gathered"
        assert [replica.verified for replica in made.last_round().replicas] == ["installed"] * WORKERS
        made.shutdown()
        made.sync(3)
        assert made.holds()
    finally:
        made.kill()


def test_a_policy_with_fp8_scales_streams_to_all_workers(folder: Path, model: str) -> None:
    config = generation_config(folder)
    config["vllm_cfg"]["kv_cache_dtype"] = "fp8"
    made = RayRefits(config, model)
    try:
        made.sync(1)
        assert made.holds()
        assert made.walked() == [True] * POLICIES
        assert [replica.verified for replica in made.last_round().replicas] == ["received"] * WORKERS
    finally:
        made.kill()


class ColocatedRefits(RayRefits):
    """The same on shared GPUs: NeMo-RL's function for updates, and what its driver calls of policy and generation around them."""

    def make_synchronizer(self) -> None:
        self.order: list[str] = []

        def does(name: str, result: Any = None) -> Any:
            def called(*_: Any, **given: Any) -> Any:
                self.order.append(" ".join([name, *given.get("tags", ())]))
                return result

            return called

        policy, generation = self.policy, self.generation
        policy.offload_before_refit, policy.offload_after_refit = does("offload before"), does("offload after")
        policy.stream_weights_via_ipc_zmq, policy.get_free_memory_bytes = does("sent", []), lambda: 1 << 30
        generation.prepare_for_generation, generation.weight_synchronizer = does("wake"), None
        generation.update_weights_via_ipc_zmq = does("received", [])
        self.refit = functools.partial(colocated.synchronized, refit_of_nemo_rl())

    def sync(self, seed: int) -> None:
        self._change(seed)
        self.refit(self.policy, self.generation, True)
        assert not self.generation.weight_synchronizer.is_stale


def refit_of_nemo_rl() -> Any:
    """NeMo-RL's ``refit_policy_generation``, whose module imports more than there is here."""
    tree = ast.parse((Path(nemo_rl.__file__).parent / "algorithms/grpo.py").read_text())
    (function,) = [node for node in tree.body if getattr(node, "name", "") == "refit_policy_generation"]
    names: dict[str, Any] = {}
    code = compile(ast.Module([function], []), "grpo.py", "exec", __future__.annotations.compiler_flag)
    exec(code, names)
    return names["refit_policy_generation"]


BRACKET = ["offload before", "wake weights", "offload after", "wake kv_cache"]


@pytest.mark.parametrize("async_engine", [False, True])
def test_on_shared_gpus_shards_travel_within_nemo_rls_own_order_of_calls(folder: Path, model: str, async_engine: bool) -> None:
    made = ColocatedRefits(generation_config(folder, colocated=True, async_engine=async_engine), model)
    try:
        for seed in range(2):
            made.sync(seed)
            assert made.holds()
        assert made.order == BRACKET * 2
        assert made.walked() == [False] * POLICIES, "nothing is gathered"
        assert [replica.verified for replica in made.last_round().replicas] == ["installed"] * WORKERS
        assert made.status().trainer_world_size == POLICIES, "policy ranks keep their copies, and stay joined"
        made.set_faults(["", "raise"], ["", ""])
        with pytest.raises(RayTaskError, match="the parameters cannot be loaded"):
            made.sync(2)
        assert made.status().trainer_world_size == 0, "after an error they join again"
        assert made.order == BRACKET * 3, "NeMo-RL's own order also after an error"
        ray.get([worker.holds.remote() for worker in made.workers], timeout=SECONDS / 2)  # vLLM's call was ended
        made.set_faults(["", ""], ["", ""])
        for seed in (3, 4):
            made.sync(seed)
            assert made.holds()
        assert made.status().trainer_world_size == POLICIES
    finally:
        made.kill()


def test_on_shared_gpus_copies_are_freed_after_each_update_if_the_user_wants_that(
    folder: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colocated.ColocatedSynchronizer, "chosen", {"keep_copy": False})
    made = ColocatedRefits(generation_config(folder, colocated=True), model)
    try:
        for seed in range(2):
            made.sync(seed)
            assert made.holds()
            assert made.status().trainer_world_size == 0
    finally:
        made.kill()


def test_on_shared_gpus_nemo_rl_transfers_what_has_fp8_scales(folder: Path, model: str, caplog: pytest.LogCaptureFixture) -> None:
    config = generation_config(folder, colocated=True)
    config["vllm_cfg"]["kv_cache_dtype"] = "fp8"
    made = ColocatedRefits(config, model)
    try:
        for seed in range(2):
            made.sync(seed)
        assert made.order == [*BRACKET[:2], "sent", "received", *BRACKET[2:]] * 2
        assert len([record for record in caplog.records if "KV scales travel with the weights" in record.message]) == 1
    finally:
        made.kill()


def test_nemo_rl_makes_the_synchronizer_once_it_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    grpo: Any = types.ModuleType("nemo_rl.algorithms.grpo")
    decorated = functools.wraps(refit_of_nemo_rl())(refit_of_nemo_rl())  # as others may: it looks like a wrapper
    grpo.refit_policy_generation = decorated
    monkeypatch.setitem(sys.modules, grpo.__name__, grpo)
    ppo: Any = types.ModuleType("nemo_rl.algorithms.ppo")
    ppo.refit_policy_generation = grpo.refit_policy_generation
    monkeypatch.setitem(sys.modules, ppo.__name__, ppo)
    monkeypatch.setattr(ipc_weight_synchronizer, "IPCWeightSynchronizer", ipc_weight_synchronizer.IPCWeightSynchronizer)
    monkeypatch.setattr(colocated.ColocatedSynchronizer, "chosen", {})
    with pytest.raises(ConfigurationError, match="timeou"):
        enable(timeou=3.0)
    enable(timeout=3.0)
    wrapped = grpo.refit_policy_generation
    assert wrapped is not decorated
    enable(timeout=4.0)
    assert grpo.refit_policy_generation is ppo.refit_policy_generation is wrapped
    generation = types.SimpleNamespace(cfg={"backend": "vllm"}, weight_synchronizer=None)
    made = create_weight_synchronizer(types.SimpleNamespace(), generation, "vllm", colocated=True, refit_buffer_size_gb=2)
    assert isinstance(made, colocated.ColocatedSynchronizer)
    generation.weight_synchronizer = made
    enable()
    kept = pickle.loads(pickle.dumps(made))  # by NeMo-RL, for the actor that is its single controller
    assert (kept.options, kept._compute_buffer_size()) == ({"timeout": 4.0}, 2 << 30)
    assert kept._policy.stream_weights_via_ipc_zmq == kept._send
    assert kept._generation.cfg["backend"] == "vllm"


def test_the_benchmark_on_gpus_configures_nemo_rl(tmp_path: Path) -> None:
    for place, transport in (("separated", NAME), ("colocated", None)):
        options = BENCHMARK.arguments([place, "tiny", "--gpus", "2", "--nemo-rl", str(CONFIGS.parents[1])])
        policy = BENCHMARK.configured(options, tmp_path)
        refit = checkpoint_engine_refit_config(policy["generation"])
        assert (refit and refit["backend"]) == transport
        assert policy["model_name"] == policy["generation"]["model_name"] == str(tmp_path)
        assert policy["generation"]["vllm_cfg"]["tensor_parallel_size"] == 2
        WRITER.write_checkpoint(tmp_path, options.model)
        assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 3


def test_a_script_is_started_as_python_does(tmp_path: Path) -> None:
    """With its folder on the path, and its arguments. NeMo-RL's algorithms import more than there is here."""
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "script.py").write_text("import sys, beside\nprint(__name__, sys.argv[1:])")
    start = "import runpy, weightsync.integrations.nemo_rl as door; door.enable = lambda: None; "
    start += "runpy.run_module('weightsync.integrations.nemo_rl', run_name='__main__', alter_sys=True)"

    def run(*arguments: str) -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-c", start, *arguments], capture_output=True, text=True, timeout=120)
        return done.stdout.strip(), done.stderr.strip()

    assert run(str(tmp_path / "script.py"), "--config", "x") == ("__main__ ['--config', 'x']", "")
    assert run()[1].startswith("usage: python -m weightsync.integrations.nemo_rl SCRIPT")


@pytest.fixture(scope="module")
def refits(folder: Path) -> Iterator[RayRefits]:
    made = RayRefits(generation_config(folder))
    try:
        yield made
    finally:
        made.kill()


class TestRefits(RefitContract):
    """With NeMo-RL's synchronizer, groups of workers and mixins."""


def test_the_token_is_nowhere_in_what_ranks_tell_each_other_and_in_what_ray_keeps(refits: RayRefits, folder: Path) -> None:
    about = ray.get(refits.synchronizer._run_policy("prepare_checkpoint_engine"))
    token = find_token(Address.parse(about[0]["coordinator"]))
    assert token is not None
    assert token.reveal() not in str(about)
    session = folder / "session_latest"
    assert not [path for path in session.rglob("*") if path.is_file() and token.reveal().encode() in path.read_bytes()]


def test_asynchronous_engines_with_sharded_experts_that_are_released_after_each_update(folder: Path) -> None:
    made = RayRefits(generation_config(folder, async_engine=True, release_after_refit=True, shard_expert_weights=True))
    try:
        for seed in range(2):
            made.sync(seed)
            own = {name: digest for name, digest in expected(seed).items() if not name.startswith("lm_head.")}
            assert made.loaded() == [own] * WORKERS, "a worker loads what its layout has"
    finally:
        made.kill()


def test_a_worker_that_dies_in_the_middle_is_an_error_of_the_policy_and_of_no_other_worker(refits: RayRefits) -> None:
    """The last one with these workers: NeMo-RL does not replace one."""
    refits.set_faults(["", ""], ["die", ""])
    policies, workers = refits.fail(20)
    assert all(isinstance(error, RoundFailed) and " of 2 rollout ranks" in str(error) for error in policies), policies
    assert isinstance(workers[0], RayActorError)
    assert isinstance(workers[1], AssertionError), "no error"
    assert ray.get(refits.workers[1].loaded.remote()) == expected(20)
    assert refits.walked() == [True] * POLICIES


def test_the_protocol_is_that_of_this_nemo_rl() -> None:
    def parameters(kind: type) -> dict[str, list[str]]:
        methods = {name: method for name, method in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
        return {name: list(inspect.signature(method).parameters) for name, method in methods.items()}

    assert parameters(RefitProtocol) == parameters(CheckpointEngine)


def test_the_check_of_an_installation_finds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WEIGHTSYNC_")]:
        monkeypatch.delenv(name)
    command = [sys.executable, "-m", "weightsync.integrations", "nemo_rl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line[9:22].strip(): line.split()[0] for line in done.stdout.splitlines() if line[0] != " "}
    assert found == {"weightsync": "ok", "nemo_rl": "ok", "engine": "ok", "vLLM": "limited", "token": "limited"}

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, ANN204
"""Prints what rounds leave in the slots of vLLM's own model of experts while its own ``EplbState`` rebalances between and in them.

``python vllm_moving.py FOLDER RANK RANKS PARALLEL KIND``. PARALLEL has arguments of vLLM's engine as JSON, KIND is ``now`` or
``background``. Nothing is computed with the model. The CPU has no events and streams, so others stand in that are always done.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

os.environ.update(VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import torch
import transformers
from tests.integration.vllm.vllm_tracing import COMMON, INNER, build

from weightsync.deadline import Deadline

LOGICAL, REDUNDANT, ROUNDS, SECONDS = 6, 2, 4, 60.0
SIZES = COMMON | INNER | {"num_key_value_heads": 2, "num_experts": LOGICAL, "num_experts_per_tok": 2}


class Done:
    """An event, or a stream, of a device that has always done everything."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def wait(self, *args):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 0.0


class AnyMap:
    """A policy whose maps are drawn from a seed that all ranks share: every expert somewhere, and some twice."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def rebalance_experts(self, load, slots, *args):
        rows = []
        for _ in load:
            experts = torch.cat([torch.arange(LOGICAL), torch.randint(LOGICAL, (slots - LOGICAL,), generator=self.generator)])
            rows.append(experts[torch.randperm(slots, generator=self.generator)])
        return torch.stack(rows)


def configured(folder, rank, ranks, parallel):
    """vLLM's configuration and groups, as for a GPU: its CPU build does not balance."""
    from vllm.config import set_current_vllm_config
    from vllm.config.parallel import EPLBConfig
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    type(current_platform).is_cuda_alike = lambda self: True
    balancing = EPLBConfig(
        num_redundant_experts=REDUNDANT, step_interval=1, window_size=1, use_async=False, communicator="torch_gloo"
    )
    parallel |= {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": balancing}
    if "data_parallel_size" in parallel:
        parallel["data_parallel_rank"] = rank
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.manual_seed(11)
    made = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**SIZES), dtype=torch.bfloat16)
    if rank == 0:
        made.save_pretrained(folder / "model")
    torch.distributed.barrier()
    asked = EngineArgs(model=str(folder / "model"), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32, **parallel)
    chosen = asked.create_engine_config()
    alone = (1, 0) if "data_parallel_size" in parallel else (ranks, rank)
    with set_current_vllm_config(chosen):
        init_distributed_environment(*alone, local_rank=rank, backend="gloo")
        initialize_model_parallel(parallel.get("tensor_parallel_size", 1), 1)
    del type(current_platform).is_cuda_alike
    return chosen, made


class Worker:
    """What a worker of vLLM has of a model and its balancing."""

    def __init__(self, folder, rank, ranks, parallel, background):
        from vllm.config import set_current_vllm_config
        from vllm.distributed.eplb import async_worker, eplb_state

        from weightsync.engines.vllm.experts import follow_balancing

        torch.Event = torch.accelerator.current_stream = Done
        torch.accelerator.set_stream = lambda stream: None
        self.rank, self.ranks = rank, ranks
        self.config, self.trained = configured(folder, rank, ranks, parallel)
        follow_balancing()
        with set_current_vllm_config(self.config):
            self.model = build(self.config, "cpu")
            self.model.load_weights(self.trained.state_dict().items())
        self.state = eplb_state.EplbState(self.config.parallel_config, torch.device("cpu"))
        self.state.add_model(self.model, self.config.model_config)
        self.state.policy = AnyMap()
        [self.balanced] = self.state.model_states.values()
        if background:
            self.state.is_async = True
            arguments = {"state": self.state, "stream": Done()}
            threading.Thread(target=async_worker.transfer_run_periodically, kwargs=arguments, daemon=True).start()

    @property
    def map(self):
        return self.balanced.physical_to_logical_map.clone()

    def wrong(self):
        """Slots of this rank, and other parameters, that do not hold what is trained."""
        tensors, wrong = self.trained.state_dict(), []
        for layer, (name, experts) in enumerate(
            (name, module) for name, module in self.model.named_modules() if type(module).__name__ == "RoutedExperts"
        ):
            prefix, count = name.removesuffix(".routed_experts"), len(experts.w13_weight)
            for slot, expert in enumerate(self.map[layer, self.rank * count : (self.rank + 1) * count].tolist()):
                wanted = (tensors[f"{prefix}.{part}"][expert] for part in ("gate_up_proj", "down_proj"))
                if not all(map(torch.equal, (experts.w13_weight[slot], experts.w2_weight[slot]), wanted)):
                    wrong.append((layer, slot, expert))
        if not torch.equal(self.model.model.norm.weight, tensors["model.norm.weight"]):
            wrong.append("norm")
        return wrong

    def load(self, tensors, *_):
        self.model.load_weights(tensors)

    def train(self, seed, names=""):
        """Give all parameters with ``names`` the same new values on every rank."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.trained.named_parameters():
                if names in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def joined(self, url, token):
        """An engine rank whose ``pause`` finds vLLM in the middle of steps that would rebalance."""
        import weightsync
        from weightsync.engines.hf_checkpoint import checkpoint_of
        from weightsync.engines.traced_shards import find_direct
        from weightsync.engines.vllm.adapter import VllmWorkerAdapter
        from weightsync.engines.vllm.experts import MovingExperts

        worker = self

        class Adapter(VllmWorkerAdapter):
            pauses_twice = True

            def pause(self, mode, timeout):
                before = worker.map
                for _ in range(3 * (len(worker.held) % 2)):  # in every other round a step comes only when it is over
                    worker.state.step()
                if len(worker.held) == 2:  # as if a layer was copied since, because the hold was over before the pause
                    worker.adapter._experts.hold._until, worker.adapter._experts.hold._discards = 0.0, False
                worker.held.append(torch.equal(worker.map, before))

        self.held = []
        checkpoint = checkpoint_of(self.config.model_config.model, None, self.config.model_config.hf_config)
        experts = MovingExperts(self.model, self.state)
        # vLLM's CPU build would pack other weights after loading them, so the trial runs its loader alone.
        trial = partial(find_direct, self.model, checkpoint.manifest, self.load, torch.device("cpu"), self.ranks)
        direct = trial(to_load=experts.all_here, moving=experts)
        assert not isinstance(direct, str), direct
        self.adapter = Adapter(checkpoint, None, direct, torch.device("cpu"), experts=experts)
        return weightsync.Engine(self.adapter, "vllm", url, token=token, rank=self.rank, world_size=self.ranks, delivery="direct")

    @property
    def discards(self):
        return self.state.is_async and self.balanced.rebalanced and self.adapter._experts.hold._discards

    def step(self):
        """Count a step. In the background a layer is ready first, if one is copied."""
        if self.state.is_async and self.balanced.rebalanced:
            deadline = Deadline(SECONDS)
            while self.balanced.pending_result is None:
                deadline.remaining("waiting for a layer that is copied")
                time.sleep(0.01)
        torch.distributed.barrier()
        before = self.map
        self.state.step()
        return not torch.equal(before, self.map)


def run(worker, url, token, trainer):
    """Rounds, and what they left. ``trainer`` publishes, on rank 0."""
    from weightsync.errors import StaleSource
    from weightsync.protocol.messages import Audit

    seen = {"wrong": [], "moved": 0, "results": [], "audits": [], "maps": []}
    with worker.joined(url, token) as engine:

        def audited():
            try:
                engine._role.handle(Audit(engine.serving), SECONDS)
            except StaleSource:
                return "moved"
            return "same"

        def publish(number):
            torch.distributed.barrier()
            if trainer is not None:
                result = trainer.publish(number, timeout=SECONDS)
                [replica] = result.replicas
                seen["results"].append([replica.version, replica.delivery, replica.verified, replica.base, replica.error])
            engine.wait_for_version(number, SECONDS)
            torch.distributed.barrier()
            seen["wrong"] += [(number, *each) for each in worker.wrong()]
            seen["maps"].append(worker.map.tolist())

        for number in range(1, ROUNDS + 1):
            worker.train(number)
            publish(number)
            moves = worker.adapter._experts.hold.moves
            while worker.discards:  # one layer in each step
                assert not worker.step(), "what was copied before the round is in use"
            # One step rebalances; in the background one begins, and each of the next takes one of two layers, so that every
            # other round finds a layer that was copied and not taken.
            for _ in range(2 + number % 2):
                seen["moved"] += worker.step()
                seen["wrong"] += [(f"after {number}", *each) for each in worker.wrong()]
            seen["audits"].append(audited() if worker.adapter._experts.hold.moves > moves else "none moved")
        for number in (ROUNDS + 1, ROUNDS + 2):  # after a rebalancing all bytes, then what changed
            worker.train(number, "norm")
            publish(number)
        seen["audits"].append(audited())
        seen["held"] = worker.held
        torch.distributed.barrier()
    return seen


def main(folder, rank, ranks, parallel, kind):
    import weightsync
    from weightsync.config import ServerSettings
    from weightsync.server.server import BackgroundServer

    torch.set_num_threads(1)
    worker = Worker(folder, rank, ranks, parallel, kind == "background")
    with ExitStack() as owned:
        where, trainer = [None], None
        if rank == 0:
            server = owned.enter_context(BackgroundServer(ServerSettings(port=0)))
            where = [(server.url, server.token)]
            trainer = owned.enter_context(
                weightsync.Trainer(worker.trained, server.url, token=server.token, rank=0, world_size=1, deltas=True)
            )
        torch.distributed.broadcast_object_list(where, 0)
        seen = run(worker, *where[0], trainer)
        torch.distributed.barrier()
    print("RESULT " + json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[5])

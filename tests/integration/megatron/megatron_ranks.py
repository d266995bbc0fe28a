"""The trainer ranks of the Megatron tests: real Megatron-core models on gloo, in processes forked from one that has imported it.

Reads one case a line, as JSON. Rank 0 of the case then writes lines, and waits for one after each publication.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from safetensors.torch import save_file
from tests.integration.megatron.megatron_cases import VOCABULARY, Case, hf_config
from tests.integration.megatron.megatron_fsdp import change, sharded
from tests.integration.megatron.megatron_models import build, fill, initialize, wrapped

import weightsync
from weightsync.integrations.megatron import hf_state

COLLECTIVES = [
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "gather", "irecv", "isend", "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
]  # fmt: skip


@contextmanager
def no_collectives() -> Iterator[None]:
    """Fail on every call of torch.distributed that talks to other ranks."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a collective was called")

    saved = {name: getattr(dist, name) for name in COLLECTIVES}
    for name in COLLECTIVES:
        setattr(dist, name, refuse)
        setattr(dist.distributed_c10d, name, refuse)
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(dist, name, function)
            setattr(dist.distributed_c10d, name, function)


def say(output: TextIO, **what: Any) -> None:
    output.write(json.dumps(what) + "\n")
    output.flush()


def store(chunks: list[torch.nn.Module], folder: Path, version: int) -> None:
    """The raw Megatron parameters of this rank, for the reference conversion."""
    tensors = {f"{index}/{name}": value.detach().clone() for index, chunk in enumerate(chunks) for name, value in _state(chunk)}
    save_file(tensors, folder / f"{version}-{dist.get_rank()}.safetensors")


def _place(chunks: list[torch.nn.Module]) -> list[Any]:
    """This rank in each group, and the dimension along which each parameter is cut, -1 for none."""
    cut = {
        f"{index}/{name}": int(getattr(value, "partition_dim", -1)) if getattr(value, "tensor_model_parallel", False) else -1
        for index, chunk in enumerate(chunks)
        for name, value in _state(chunk)
    }
    return [
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
        cut,
    ]


def _state(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chunk.named_parameters()
    yield from ((name, value) for name, value in chunk.named_buffers() if name.endswith("expert_bias"))


def forward(chunk: torch.nn.Module, folder: Path, version: int) -> None:
    """What Megatron computes with these weights."""
    ids = torch.arange(24).view(2, 12) * 7 % VOCABULARY
    positions = torch.arange(12).expand(2, 12).contiguous()
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = chunk(ids, positions, mask)
    if dist.get_rank() == 0:
        save_file({"ids": ids, "logits": logits[..., :VOCABULARY].contiguous()}, folder / f"{version}-logits.safetensors")


def refused(model: list[torch.nn.Module], case: Case, changes: dict[str, Any]) -> str:
    """What hf_state raises for a configuration that the model does not have."""
    try:
        hf_state(model, config=hf_config(case.family, {**case.changes, **changes}))
    except weightsync.WeightSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run(rank: int, case: Case, folder: Path, orders: int, results: int) -> None:
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    multi_latent_attention.TELinear = torch.nn.Bilinear  # a type that no module has: None, without TransformerEngine, fails
    CudaRNGStatesTracker.fork = lambda self, *_, **__: nullcontext()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=case.world, timeout=timedelta(seconds=90)
    )
    if case.fsdp:
        shards = sharded(case)
        publish(rank, case, shards, orders, results, lambda version: change(shards, version))
        return
    initialize(case)
    torch.manual_seed(1)
    chunks = build(case)
    model = wrapped(chunks)
    (folder / f"place-{rank}.json").write_text(json.dumps(_place(chunks)))
    if case.contradictions:
        errors = [refused(model, case, changes) for changes in case.contradictions]
        if rank == 0:
            say(os.fdopen(os.dup(results), "w"), errors=errors)
        dist.barrier()
        dist.destroy_process_group()
        return
    with no_collectives():
        state = hf_state(model, config=hf_config(case.family, case.changes))

    def place(version: int) -> None:
        fill(chunks, version)
        store(chunks, folder, version)
        if case.forward:
            forward(chunks[0], folder, version)

    publish(rank, case, state, orders, results, place)


def publish(rank: int, case: Case, state: Any, orders: int, results: int, place: Callable[[int], None]) -> None:
    """Publish all versions. ``place`` gives the weights of a version."""
    output, control = os.fdopen(os.dup(results), "w"), os.fdopen(os.dup(orders))
    with weightsync.Trainer(state, dtype=torch.bfloat16 if case.fsdp else None) as trainer:  # its main weights are float32
        if rank == 0:
            say(output, environment=trainer.environment)
        for version in range(1, case.versions + 1):
            place(version)
            dist.barrier()
            trainer.wait_for_replicas(1, timeout=60)
            result = trainer.publish(version, timeout=60)
            if rank == 0:
                say(output, published=version, replicas=[[one.state, one.verified, one.delivery] for one in result.replicas])
                control.readline()
            dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    context = multiprocessing.get_context("fork")
    orders, results = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what Megatron prints is not for the pipe
    control, output = os.fdopen(orders), os.fdopen(results, "w")
    say(output, ready=True)
    for line in iter(control.readline, ""):
        given, folder = json.loads(line)
        case = Case(**given)
        ranks = [
            context.Process(target=run, args=(rank, case, Path(folder), orders, results), daemon=True) for rank in range(case.world)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(120)
        for one in ranks:
            if one.exitcode is None:
                one.kill()
        say(output, ended=[one.exitcode for one in ranks])


if __name__ == "__main__":
    main()

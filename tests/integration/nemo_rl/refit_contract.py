"""What NeMo-RL calls of a checkpoint engine, as a protocol, and tests of updates that also pass with NeMo-RL's own classes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from weightsync.errors import Aborted, RoundFailed

Batch = list[tuple[str, torch.Tensor]]

BUCKET_BYTES = 1 << 20
SECONDS = 20.0
POLICIES = WORKERS = 2
SHAPES = {
    "model.embed_tokens.weight": ((1200, 300), torch.bfloat16),
    **{f"model.layers.{layer}.mlp.up_proj.weight": ((256, 300), torch.bfloat16) for layer in range(8)},
    "model.layers.0.mlp.gate.weight": ((8, 300), torch.float32),
    "lm_head.weight": ((2000, 300), torch.float32),
    "model.norm.weight": ((300,), torch.float32),
}
"""The head is larger than a bucket, and dtypes differ."""


class RefitProtocol(Protocol):
    """Methods, and names of arguments, that NeMo-RL uses; ``test_nemo_rl_classes.py`` compares it with NeMo-RL's base class."""

    shard_expert_weights: bool

    def get_target_weight_layout(self) -> dict[str, Any] | None: ...

    def prepare(self) -> Any: ...

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    def finalize(self) -> None: ...

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def receive_weight_batches(self) -> AsyncIterator[Batch]: ...


class PolicyModel:
    """Yields one tensor after the other in the same memory, as NeMo-RL's policy does, until the fault that a test asked for."""

    def __init__(self, rank: int, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = SHAPES) -> None:
        self.rank, self.shapes = rank, shapes
        self.seed, self.fault, self.walked = 0, "", False
        self.released = threading.Event()  # ends a walk that stopped

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.walked = False
        memory: dict[tuple[object, ...], torch.Tensor] = {}
        for place, (name, (shape, dtype)) in enumerate(self.shapes.items()):
            if place == 4 and self.fault == "raise":
                raise ValueError("the fifth tensor cannot be gathered")
            if place == 4 and self.fault == "stop":
                self.released.wait(SECONDS)
            tensor = memory.setdefault((shape, dtype), torch.empty(shape, dtype=dtype))
            tensor.copy_(_value(name, shape, self.seed))
            yield name, tensor
        self.walked = True


class WorkerModel:
    """Keeps digests of what it is given, until the fault that a test asked for."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.fault = ""

    def load(self, batch: Batch) -> None:
        self.loaded |= digests(batch)
        if self.fault == "raise" and len(self.loaded) >= 3:
            raise ValueError("the loader does not take this tensor")


def _value(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    return torch.randn(tuple(shape), generator=generator)


def digests(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """dtype, shape and hash of each tensor."""
    raw = {name: (tensor, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for name, tensor in named}
    return {name: f"{it.dtype} {tuple(it.shape)} {hashlib.sha256(data).hexdigest()}" for name, (it, data) in raw.items()}


def expected(seed: int) -> dict[str, str]:
    return digests((name, _value(name, shape, seed).to(dtype)) for name, (shape, dtype) in SHAPES.items())


class Refits(Protocol):
    """A policy of two ranks and two vLLM workers, with NeMo-RL's synchronizer or what does the same calls in the same order."""

    def sync(self, seed: int) -> None:
        """Change the weights, and bring them to all workers. Raises the first error."""
        ...

    def fail(self, seed: int) -> tuple[list[BaseException], list[BaseException]]:
        """The same, with what each policy rank and each worker raised, or an ``AssertionError`` where nothing was raised."""
        ...

    def set_faults(self, policies: Sequence[str], workers: Sequence[str]) -> None: ...

    def loaded(self) -> list[dict[str, str]]: ...

    def walked(self) -> list[bool]: ...

    def shutdown(self) -> None: ...


def works(refits: Refits, seed: int) -> None:
    refits.sync(seed)
    assert refits.loaded() == [expected(seed)] * WORKERS
    assert refits.walked() == [True] * POLICIES


class RefitContract:
    """Updates, and what fails in the middle of one. A subclass has the fixture ``refits``."""

    def test_three_updates_bring_every_worker_the_values_of_the_policy(self, refits: Refits) -> None:
        for seed in range(3):
            works(refits, seed)

    def test_a_generator_that_raises_on_all_ranks_ends_the_update_everywhere_and_the_next_one_works(self, refits: Refits) -> None:
        works(refits, 3)
        refits.set_faults(["raise", "raise"], ["", ""])
        policies, workers = refits.fail(4)
        assert all("fifth tensor" in str(error) for error in policies), policies
        assert all(isinstance(error, RoundFailed) for error in workers), workers
        refits.set_faults(["", ""], ["", ""])
        works(refits, 5)

    def test_a_generator_that_raises_on_one_rank_ends_the_update_and_the_others_walk_to_the_end(self, refits: Refits) -> None:
        works(refits, 6)
        refits.set_faults(["", "raise"], ["", ""])
        policies, workers = refits.fail(7)
        assert isinstance(policies[0], Aborted), policies
        assert "fifth tensor" in str(policies[1])
        assert all(isinstance(error, RoundFailed) for error in workers), workers
        assert refits.walked() == [True, False]
        refits.set_faults(["", ""], ["", ""])
        works(refits, 8)

    def test_a_loader_that_raises_fails_its_own_worker_and_the_policy_and_no_other_worker(self, refits: Refits) -> None:
        works(refits, 9)
        refits.set_faults(["", ""], ["raise", ""])
        policies, workers = refits.fail(10)
        assert all(isinstance(error, RoundFailed) and "reached 1 of 2 rollout ranks" in str(error) for error in policies), policies
        assert "stopped iterating" in str(policies[0])
        assert "does not take this tensor" in str(workers[0])
        assert isinstance(workers[1], AssertionError)
        assert refits.loaded()[1] == expected(10)
        assert refits.walked() == [True] * POLICIES, "every step of the walk is a collective"
        refits.set_faults(["", ""], ["", ""])
        works(refits, 11)

    def test_after_a_shutdown_the_next_update_prepares_anew(self, refits: Refits) -> None:
        works(refits, 12)
        refits.shutdown()
        refits.shutdown()
        works(refits, 13)


def raised(errors: Iterable[BaseException | None]) -> list[BaseException]:
    return [AssertionError("no error") if error is None else error for error in errors]

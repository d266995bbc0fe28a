"""An engine rank in a process of its own: ``python -m tests.gpu.engine_process REPLICA DEVICE [STOP [DELIVERY [TRANSPORT]]]``.

The environment says where the coordinator is, and whether other replicas may read what this one serves. Prints ``joined``. Then it
answers each line: ``?`` with the SHA-256 of its parameters, ``wait NUMBER`` with the version that it serves then, ``take`` after
another front of the same engine has overwritten them. With ``STOP`` (``pause`` or ``finish``), it says so when a round gets there,
and stands still, to be killed.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from typing import Literal

import torch

from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.engine.session import EngineSession
from weightsync.engines.module import ModuleAdapter
from weightsync.model import PauseMode, Version

__all__ = ["Model", "fingerprint"]


class Model(torch.nn.Module):
    """Odd shapes and dtypes, a tied head, and one parameter larger than the allocator's shared segments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(37, 24, dtype=torch.bfloat16)
        self.up = torch.nn.Linear(24, 51, dtype=torch.bfloat16)
        self.norm = torch.nn.LayerNorm(51)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 7))
        self.turned = torch.nn.Parameter(torch.zeros(33, 65).t())
        self.large = torch.nn.Parameter(torch.zeros(6001, 2048, dtype=torch.bfloat16))
        self.head = torch.nn.Linear(24, 37, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight


def fingerprint(module: torch.nn.Module) -> str:
    """SHA-256 of all parameters, in the order of their names."""
    found = hashlib.sha256()
    for _, tensor in sorted(module.state_dict().items()):
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Stopping(ModuleAdapter):
    """Stands still where it is told to."""

    def __init__(self, module: torch.nn.Module, stop: str) -> None:
        super().__init__(module)
        self._stop = stop

    def _maybe(self, where: str) -> None:
        if self._stop == where:
            print(where, flush=True)
            threading.Event().wait(60)

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self._maybe("pause")
        super().pause(mode, timeout)

    def finish(self, version: Version) -> None:
        self._maybe("finish")
        super().finish(version)


@torch.no_grad()
def take(adapter: EngineAdapter, module: torch.nn.Module) -> None:
    """Overwrite all parameters by way of another front."""
    front = EngineSession(adapter, "another front")
    with front.turn(front.receive("an update from outside"), Deadline(20)):
        front.pause("abort", 20)
        with front.writing():
            for parameter in module.parameters():
                parameter.fill_(7)
            torch.cuda.synchronize()


def main() -> None:
    replica, device, stop, delivery, transport = [*sys.argv[1:], *["", "", "auto", ""][len(sys.argv) - 2 :]]
    model = Model().to(f"cuda:{device}")
    how: Literal["auto", "streamed"] = "streamed" if delivery == "streamed" else "auto"
    adapter = Stopping(model, stop)
    with Engine(adapter, replica, delivery=how, transports=[transport] if transport else None) as engine:
        print("joined", flush=True)
        for line in sys.stdin:
            match line.split():
                case ["wait", number]:
                    print(engine.wait_for_version(int(number), 30).number, flush=True)
                case ["take"]:
                    take(adapter, model)
                    print("taken", flush=True)
                case _:
                    print(fingerprint(model), flush=True)


if __name__ == "__main__":
    main()

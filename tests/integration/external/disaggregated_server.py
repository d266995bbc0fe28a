"""A server that is updated from outside, in a process of its own: real modules behind the routes, and a window into them.

``python disaggregated_server.py '{"ranks": 2, ...}'`` prints its port and serves until it is killed or its input ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterable

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weightsync.config import Secret
from weightsync.engines.module import ModuleAdapter
from weightsync.model import PauseMode, Version
from weightsync_disaggregated import DisaggregatedRank, LocalRanks, Settings, WeightUpdates, weight_update_routes

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed.weight": ((37, 8), torch.bfloat16),
    "layers.0.up.weight": ((8, 5), torch.float32),
    "layers.0.codes": ((3, 7), torch.int8),
    "layers.1.up.weight": ((8, 5), torch.float32),
    "layers.1.empty": ((0, 4), torch.bfloat16),
    "norm.scale": ((), torch.float32),
    "head.weight": ((5, 8), torch.bfloat16),
}
DRAFT: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"mtp.head.weight": ((5, 8), torch.bfloat16)}


def checkpoint(seed: int, *, draft: bool = False) -> dict[str, torch.Tensor]:
    """Values by name, different for every seed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = SHAPES | (DRAFT if draft else {})
    return {
        name: (torch.randn(shape, generator=generator) * 20).to(dtype) for name, (shape, dtype) in shapes.items()
    }  # fmt: skip


def module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose parameters have these names."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        at = root
        *path, last = name.split(".")
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return root


class Watched(ModuleAdapter):
    """Records its calls; raises, or reverses what it loads, when told to."""

    def __init__(self, module: torch.nn.Module, calls: list[str], fault: dict[str, str]) -> None:
        super().__init__(module)
        self.calls, self.fault = calls, fault

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self.calls.append(f"pause {mode}")
        super().pause(mode, timeout)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.calls.append(f"load {name}")
            if self.fault.get("raise_at") == name:
                raise ValueError(f"no room for {name}")
            spoiled = self.fault.get("spoil") == name
            super().load([(name, tensor + 1 if spoiled else tensor)])

    def finish(self, version: Version) -> None:
        self.calls.append(f"finish {version}")
        super().finish(version)

    def flush(self) -> bool:
        self.calls.append("flush")
        return "refuse_flush" not in self.fault

    def resume(self) -> None:
        self.calls.append("resume")
        if "refuse_resume" in self.fault:
            raise RuntimeError("cannot resume")
        super().resume()


def main() -> None:
    """Serve."""
    torch.set_num_threads(1)
    wish = json.loads(sys.argv[1])
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    calls: list[str] = []
    faults: list[dict[str, str]] = [{} for _ in range(wish["ranks"])]
    mains = [module_of(checkpoint(-1)) for _ in faults]
    drafts = [module_of({k: v for k, v in checkpoint(-1, draft=True).items() if k in DRAFT}) for _ in faults]
    packing = wish.get("packing", "elements")
    ranks = [
        DisaggregatedRank(
            Watched(mains[rank], calls, faults[rank]),
            Watched(drafts[rank], calls, faults[rank]) if wish.get("draft") else None,
            rank=rank,
            reset_graphs=lambda: calls.append("reset graphs"),
        )
        for rank in range(wish["ranks"])
    ]
    updates = WeightUpdates(LocalRanks(*ranks), Settings(packing=packing, **wish.get("settings", {})))

    async def parameters(request: Request) -> Response:
        rank = int(request.query_params["rank"])
        own = {**dict(mains[rank].named_parameters()), **(dict(drafts[rank].named_parameters()) if wish.get("draft") else {})}
        found = own[request.query_params["name"]].detach().contiguous().reshape(-1).view(torch.uint8)
        return Response(bytes(found.tolist()))

    async def fault(request: Request) -> Response:
        faults[int(request.query_params["rank"])].clear()
        faults[int(request.query_params["rank"])].update(await request.json())
        return JSONResponse({})

    async def seen(request: Request) -> Response:
        found = calls.copy()
        calls.clear()
        return JSONResponse(found)

    token = wish.get("token")
    app = Starlette(
        routes=[
            *weight_update_routes(updates, Secret(token) if token else None),
            Route("/test/parameters", parameters),
            Route("/test/fault", fault, methods=["POST"]),
            Route("/test/calls", seen),
        ]
    )
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main()

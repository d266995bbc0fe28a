"""Engines as they document themselves, strictly: LMDeploy, SGLang and vLLM's routes around a real module, in a process of its own.

What an engine would silently let pass is refused here (unknown fields, a flush before the last bucket), so that a client that goes
astray fails its tests. The process group is made as these engines make it, with torch's own private helper. Nothing of weightsync
but its test module is used on this side of the wire.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, ClassVar

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

import torch
import torch.distributed as dist
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.integration.external.disaggregated_server import checkpoint, module_of
from torch.distributed import distributed_c10d as c10d

_c10d: Any = c10d


class Misuse(Exception):
    """A documented rule was broken."""

    status = 400


def custom_group(address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> Any:
    """The recipe that these engines share, for torch 2.6 and newer."""
    timeout = timedelta(seconds=20)
    store, rank, world_size = next(iter(_c10d.rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout)))
    store.set_timeout(timeout)
    store = _c10d.PrefixStore(name, store)
    options = (
        "backend_options" if "backend_options" in inspect.signature(_c10d._new_process_group_helper).parameters else "pg_options"
    )
    group, _ = _c10d._new_process_group_helper(
        world_size, rank, [], backend, store, group_name=name, **{options: None}, timeout=timeout
    )
    _c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


class Engine:
    """What the three have in common: a module, groups, a loader that can be told to fail."""

    init_fields: ClassVar[set[str]] = {"master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"}
    looks_first: ClassVar[bool] = True
    """Whether names and shapes are compared before anything is received."""
    update_fields: ClassVar[set[str]] = {"names", "dtypes", "shapes", "group_name", "load_format"}

    def __init__(self, wish: dict[str, Any]) -> None:
        self.wish, self.fault = wish, dict[str, str]()
        self.module = module_of(checkpoint(-1))
        self.groups: dict[str, Any] = {}
        self.log: list[str] = []

    def fields(self, body: dict[str, Any], required: set[str], optional: set[str]) -> None:
        missing, unknown = required - set(body), set(body) - required - optional
        if missing or unknown:
            raise Misuse(f"missing fields {sorted(missing)}, unknown fields {sorted(unknown)}")

    def init(self, body: dict[str, Any]) -> str:
        self.fields(body, self.init_fields - {"backend"}, {"backend"})
        name = body["group_name"]
        if name in self.groups:
            raise Misuse(f"group {name} already initialized")
        self.groups[name] = custom_group(
            body["master_address"], body["master_port"], body["rank_offset"], body["world_size"], name, body["backend"]
        )
        self.log.append("init")
        return "ok"

    def destroy(self, body: dict[str, Any]) -> str:
        self.fields(body, {"group_name"}, set())
        group = self.groups.pop(body["group_name"], None)
        if group is None:
            raise Misuse(f"group {body['group_name']} is not initialized")
        dist.destroy_process_group(group)
        self.log.append("destroy")
        return "ok"

    def receive(self, body: dict[str, Any]) -> None:
        names, dtypes, shapes = body["names"], body["dtypes"], body["shapes"]
        if not len(names) == len(dtypes) == len(shapes):
            raise Misuse("names, dtypes and shapes differ in length")
        group = self.groups.get(body["group_name"])
        if group is None:
            raise Misuse(f"group {body['group_name']} is not initialized")
        own = dict(self.module.named_parameters())
        if self.looks_first:
            self.compare(names, shapes)
        kinds = [getattr(torch, dtype) for dtype in dtypes]
        tensors = (
            self.bucket(kinds, shapes, group) if body.get("load_format") == "flattened_bucket" else self.each(kinds, shapes, group)
        )
        if self.fault.get("die_at") in names:
            os._exit(9)
        self.compare(names, shapes)
        for name, tensor in zip(names, tensors, strict=True):
            if self.fault.get("raise_at") == name:
                raise Misuse(f"rank0: RuntimeError: no room for {name}")
            own[name].data.copy_(tensor)
            self.log.append(f"load {name}")

    def compare(self, names: list[str], shapes: list[list[int]]) -> None:
        own = dict(self.module.named_parameters())
        for name, shape in zip(names, shapes, strict=True):
            if name not in own or list(own[name].shape) != shape:
                raise Misuse(f"the engine has no {name} of shape {shape}")

    def each(self, kinds: list[torch.dtype], shapes: list[list[int]], group: Any) -> list[torch.Tensor]:
        tensors = [torch.empty(shape, dtype=kind) for kind, shape in zip(kinds, shapes, strict=True)]
        for work in [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors]:
            assert work is not None
            work.wait()
        return tensors

    def bucket(self, kinds: list[torch.dtype], shapes: list[list[int]], group: Any) -> list[torch.Tensor]:
        raise NotImplementedError

    def routes(self) -> dict[str, Callable[..., Any]]:
        raise NotImplementedError


class LMDeploy(Engine):
    """Typed one-dtype buckets, offsets in elements; the last one finalizes; no session. As 0.18: received, and then refused."""

    looks_first = False

    def init(self, body: dict[str, Any]) -> str:
        if "uni_executor" in self.fault:
            raise NotImplementedError  # which its server answers with a bare 500
        return super().init(body)

    def bucket(self, kinds: list[torch.dtype], shapes: list[list[int]], group: Any) -> list[torch.Tensor]:
        if len(set(kinds)) > 1:
            raise Misuse("mixed dtypes in a flattened bucket")
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=kinds[0])
        dist.broadcast(flat, src=0, group=group)
        return [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]

    def update(self, body: dict[str, Any]) -> str:
        self.fields(body, {"names", "dtypes", "shapes", "group_name"}, {"load_format", "finished"})
        if body["names"]:
            self.receive(body)
        if body.get("finished"):
            self.log += ["finalize", "reset graphs"]
        return "ok"

    def abort(self, body: dict[str, Any]) -> None:
        self.fields(body, set(), {"abort_all", "session_id", "finished_reason", "abort_message"})
        if "no_aborts" in self.fault:
            raise PermissionError("This server does not support abort requests. Enable with --enable-abort-handling flag.")
        self.log.append("abort")

    def routes(self) -> dict[str, Callable[..., Any]]:
        return {
            "/init_weights_update_group": self.init,
            "/update_weights_from_distributed": self.update,
            "/destroy_weights_update_group": self.destroy,
            "/abort_request": self.abort,
        }


class SGLang(Engine):
    """A session around updates, byte buckets, one flush with the last."""

    def __init__(self, wish: dict[str, Any]) -> None:
        super().__init__(wish)
        self.session: str | None = None
        self.version = "default"
        self.paused: str | None = None
        self.flushed = False

    def bucket(self, kinds: list[torch.dtype], shapes: list[list[int]], group: Any) -> list[torch.Tensor]:
        sizes = [torch.Size(shape).numel() * kind.itemsize for kind, shape in zip(kinds, shapes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=group)
        found, place = [], 0
        for kind, shape, size in zip(kinds, shapes, sizes, strict=True):
            found.append(flat[place : place + size].clone().view(kind).view(shape))
            place += size
        return found

    def begin(self, body: dict[str, Any]) -> str:
        self.fields(body, set(), {"selector"})
        if body.get("selector", "all") not in ("all", "target", "draft"):
            raise Misuse("unknown selector")
        if self.session is not None:
            raise Misuse("a weight update is in progress already")
        self.session, self.flushed = "open", False
        self.log.append("begin")
        return "ok"

    def end(self, body: dict[str, Any]) -> str:
        self.fields(body, set(), set())
        if self.session is None:
            raise Misuse("no weight update is in progress")
        done, self.session = self.session == "open", None
        self.log.append("end")
        if done and not self.flushed:
            raise Misuse("the last bucket of an update did not flush the cache")
        return "ok"

    def update(self, body: dict[str, Any]) -> str:
        self.fields(
            body, {"names", "dtypes", "shapes"},
            {"group_name", "flush_cache", "abort_all_requests", "weight_version", "load_format", "selector"},
        )  # fmt: skip
        if self.session is None:
            raise Misuse("begin_weight_update must be called first")
        if self.session == "failed":
            raise Misuse("this update failed: end_weight_update, then send everything again")
        if self.flushed:
            raise Misuse("a bucket came after the one that flushed: flush_cache must be true on the last only")
        try:
            self.receive(body)
        except Misuse:
            self.session = "failed"
            raise
        if body.get("flush_cache", True):
            if self.paused not in ("abort", "retract"):
                self.session = "failed"
                raise Misuse("flush failed: requests are running")
            self.flushed = True
            self.log.append("flush")
        if "weight_version" in body:
            self.version = body["weight_version"]
        return "ok"

    def pause(self, body: dict[str, Any]) -> str:
        self.fields(body, set(), {"mode"})
        if body.get("mode", "abort") not in ("abort", "retract", "in_place"):
            raise Misuse("unknown mode")
        self.paused = body.get("mode", "abort")
        self.log.append(f"pause {self.paused}")
        return "ok"

    def resume(self, body: dict[str, Any]) -> str:
        if self.session is not None:
            raise Misuse("continued in the middle of an update")
        self.paused = None
        self.log.append("resume")
        return "ok"

    def routes(self) -> dict[str, Callable[..., Any]]:
        return {
            "/init_weights_update_group": self.init,
            "/update_weights_from_distributed": self.update,
            "/destroy_weights_update_group": self.destroy,
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.end,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "GET /model_info": lambda body: {"model_path": "test", "weight_version": self.version},
        }


class VLLM(Engine):
    """Sessions of a staged update behind vLLM's routes, with a backend that joins a group; misuse is a 500."""

    bucket = SGLang.bucket

    def __init__(self, wish: dict[str, Any]) -> None:
        super().__init__(wish)
        self.session = self.paused = self.compared = self.given_up = False
        self.sent: set[str] = set()
        self.version: str | None = None
        self.stale = False
        Misuse.status = 500

    def init_engine(self, body: dict[str, Any]) -> dict[str, Any]:
        self.fields(body, {"init_info"}, set())
        info = dict(body["init_info"])
        tensors = info.pop("tensors", None)  # the backend's own: vLLM hands init_info on as it is
        own = {name: list(parameter.shape) for name, parameter in self.module.named_parameters()}
        if tensors is not None and dict(zip(tensors["names"], tensors["shapes"], strict=True)) != own:
            raise Misuse("ManifestMismatch: other tensors than the model's")
        self.init(info)
        return {"message": "Weight transfer initialized"}

    def shutdown(self, body: dict[str, Any]) -> dict[str, Any]:
        for name in list(self.groups):
            self.destroy({"group_name": name})
        return {"message": "ok"}

    def start(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.session or not self.groups:
            raise Misuse("started twice, or not initialized")
        self.session, self.compared, self.given_up, self.sent = True, False, False, set()
        self.log.append("begin")
        return {"message": "ok"}

    def update(self, body: dict[str, Any]) -> dict[str, Any]:
        self.fields(body, {"update_info"}, set())
        info = body["update_info"]
        if not self.session or not self.paused:
            raise Misuse("no session, or not paused")
        try:
            if "abandon" in info:
                self.given_up = True
            elif "digests" in info:
                self.fields(info, {"digests"}, set())
                if set(info["digests"]) != self.sent:
                    raise Misuse("VerificationError: digests of other tensors than were sent")
                self.compared = True
            else:
                self.fields(info, self.update_fields, set())
                self.receive(info)
                self.sent.update(info["names"])
        except Misuse:
            self.session = False
            raise
        return {"message": "ok"}

    def finish(self, body: dict[str, Any]) -> dict[str, Any]:
        self.fields(body, set(), {"weight_version"})
        if not self.session or not (self.compared or self.given_up):
            raise Misuse("no session, or finished without digests")
        if self.given_up:
            self.session = False
            return {"message": "ok"}
        self.session, self.stale = False, True
        self.version = body.get("weight_version")
        self.log.append("finalize")
        return {"message": "ok"}

    def pause(self, body: dict[str, Any], mode: str = "abort", clear_cache: str = "true") -> dict[str, Any]:
        if mode not in ("abort", "wait", "keep") or clear_cache not in ("true", "false"):
            raise Misuse("unknown mode")
        self.paused = True
        self.log.append(f"pause {mode}")
        return {"status": "paused"}

    def flush(self, body: dict[str, Any]) -> dict[str, Any]:
        done = "refuse_flush" not in self.fault
        self.stale = self.stale and not done
        self.log.append("flush")
        return {"success": done}

    def resume(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.session or self.stale:
            raise Misuse("resumed in the middle of an update, or with caches of the old weights")
        self.paused = False
        self.log.append("resume")
        return {"status": "resumed"}

    def routes(self) -> dict[str, Callable[..., Any]]:
        return {
            "/init_weight_transfer_engine": self.init_engine,
            "/shutdown_weight_transfer_engine": self.shutdown,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/pause": self.pause,
            "/resume": self.resume,
            "/reset_prefix_cache": self.flush,
            "GET /weight_info": lambda body: {"weight_version": self.version},
        }


def main() -> None:
    """Serve."""
    torch.set_num_threads(1)
    wish = json.loads(sys.argv[1])
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    engine = {"lmdeploy": LMDeploy, "sglang": SGLang, "vllm": VLLM}[wish["engine"]](wish)
    needs_json = wish["engine"] != "vllm"

    def endpoint(run: Callable[..., Any]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            token = wish.get("token")
            if token and request.headers.get("authorization") != f"Bearer {token}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            try:
                if request.method == "POST" and needs_json and request.headers.get("content-type") != "application/json":
                    raise Misuse("Content-Type: application/json")
                body = await request.json() if await request.body() else {}
                done = await asyncio.to_thread(run, body, **dict(request.query_params))
            except Misuse as error:
                return JSONResponse({"success": False, "message": str(error)}, Misuse.status)
            except RuntimeError as error:  # a collective that failed
                if isinstance(error, NotImplementedError):
                    return Response("Internal Server Error", 500)
                return JSONResponse({"success": False, "message": f"rank0: {error}"}, Misuse.status)
            except PermissionError as error:
                return Response(str(error), 501)
            if done is None:
                return Response()
            return JSONResponse(done if isinstance(done, dict) else {"success": True, "message": done})

        return handle

    routes = [
        Route(path.rpartition(" ")[2], endpoint(run), methods=[path.partition(" ")[0] if " " in path else "POST"])
        for path, run in engine.routes().items()
    ]

    async def parameters(request: Request) -> Response:
        own = dict(engine.module.named_parameters())[request.query_params["name"]]
        return Response(bytes(own.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))

    async def fault(request: Request) -> Response:
        engine.fault.clear()
        engine.fault.update(await request.json())
        return JSONResponse({})

    async def seen(request: Request) -> Response:
        found = engine.log.copy()
        engine.log.clear()
        return JSONResponse(found)

    routes += [
        Route("/test/parameters", parameters),
        Route("/test/fault", fault, methods=["POST"]),
        Route("/test/calls", seen),
    ]
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main()

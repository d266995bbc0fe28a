"""For the tests of the disaggregated update: a server in its own process, and a trainer that says and sends what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import httpx
import torch
from tests.integration.fork_server import Child

from weightsync.deadline import Deadline
from weightsync.transports.broadcast.process_groups import ProcessGroup, StoreRendezvous, init_custom_process_group


class Server:
    """One server process; ``post`` and ``get`` talk to it."""

    def __init__(self, process: Child, port: int, token: str | None) -> None:
        self.process, self.url = process, f"http://127.0.0.1:{port}"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_keepalive_connections=0)  # a connection that is kept would look like a leak
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=30.0, trust_env=False, limits=limits)

    def post(self, path: str, **body: Any) -> tuple[int, str]:
        """Status and message."""
        answer = self.http.post(path, json=body)
        found = answer.json()
        assert found["success"] is (answer.status_code == 200), found
        return answer.status_code, found["message"]

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/weight_update").json()
        return found

    def calls(self) -> list[str]:
        """The engine's calls since this was last asked."""
        found: list[str] = self.http.get("/test/calls").json()
        return found

    def fault(self, rank: int = 0, **what: str) -> None:
        self.http.post("/test/fault", params={"rank": rank}, json=what).raise_for_status()

    def holds(self, tensors: dict[str, torch.Tensor], rank: int = 0) -> list[str]:
        """Names of the tensors that the engine does not hold bit for bit."""
        wrong = []
        for name, tensor in tensors.items():
            answer = self.http.get("/test/parameters", params={"rank": rank, "name": name})
            if answer.content != bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()):
                wrong.append(name)
        return wrong


@contextmanager
def serving(program: str = "tests.integration.external.disaggregated_server", **wish: Any) -> Iterator[Server]:
    """A server as wished."""
    wish = {"ranks": 1} | wish
    with closing(Child(program, json.dumps(wish))) as process:
        line = process.output.readline()
        assert line.strip().isdigit(), f"the server did not start: {line}"
        server = Server(process, int(line), wish.get("token"))
        with server.http:
            yield server


class Sender:
    """The trainer's side of one group, which posts and broadcasts at the same time, as the contract wants."""

    def __init__(self, server: Server, name: str = "weights", ranks: int = 1, seconds: float = 15.0) -> None:
        self.server, self.name, self.seconds = server, name, seconds
        rendezvous = StoreRendezvous("127.0.0.1", ranks + 1, Deadline(seconds))
        self.init = {
            "master_address": "127.0.0.1", "master_port": rendezvous.port, "rank_offset": 1, "world_size": ranks + 1,
            "group_name": name, "backend": "gloo",
        }  # fmt: skip
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(server.post, "/init_weights_update_group", **self.init)
            self.group: ProcessGroup = init_custom_process_group(
                "gloo", 0, ranks + 1, name, Deadline(seconds), rendezvous=rendezvous
            )  # fmt: skip
            assert reply.result(seconds)[0] == 200

    def body(self, tensors: dict[str, torch.Tensor], **more: Any) -> dict[str, Any]:
        names = list(tensors)
        dtypes = [str(tensors[name].dtype).removeprefix("torch.") for name in names]
        return {"names": names, "dtypes": dtypes, "shapes": [list(tensors[n].shape) for n in names], "group_name": self.name} | more

    def send(self, tensors: dict[str, torch.Tensor], **more: Any) -> tuple[int, str]:
        """One bucket: the request's status and message."""
        sent: Sequence[torch.Tensor] = [tensor.contiguous() for tensor in tensors.values()]
        if more.get("load_format") == "flattened_bucket":
            sent = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in sent])] if sent else []
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(self.server.post, "/update_weights_from_distributed", **self.body(tensors, **more))
            if sent:
                self.group.broadcast(sent, Deadline(self.seconds))
            return reply.result(self.seconds)

    def close(self) -> None:
        self.group.close()

"""Holds what servers are asked on behalf of an order: the fields that it may have, paths under a folder, and SGLang's own words."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from weightsync.errors import ConfigurationError
from weightsync_callbacks.broker import Order
from weightsync_callbacks.orders import Server, UpdateServers
from weightsync_disaggregated.clients.sglang import sglang_mode

BUCKET = {"group_name": "g", "names": ["a"], "dtypes": ["float32"], "shapes": [[4]], "load_format": "flattened_bucket"}
GROUP = {"group_name": "g", "master_address": "192.0.2.1", "master_port": 7, "backend": "nccl"}


class Told(list[tuple[str, dict[str, Any]]]):
    """Paths and bodies that reached the servers."""


@asynccontextmanager
async def servers(told: Told, kind: str = "sglang", checkpoints: str | None = None) -> AsyncIterator[UpdateServers]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            answer = b'{"success": true, "message": "done"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as threads:
        serving = threads.submit(server.serve_forever, 0.01)
        made = UpdateServers({"a": Server(f"http://127.0.0.1:{server.server_port}")}, kind=kind, checkpoints=checkpoints)
        try:
            yield made
        finally:
            await made.aclose()
            server.shutdown()
            serving.result(5)


async def asked(kind: str, body: dict[str, Any], *, engine: str = "sglang", checkpoints: str | None = None) -> Told:
    told = Told()
    async with servers(told, engine, checkpoints) as made:
        await made.carry_out(Order("id", kind, body, 5.0))
    return told


async def test_sglang_keeps_requests_by_retracting_them() -> None:
    """In place, their cache entries are of the old weights, and SGLang refuses to flush after the weights have changed."""
    assert (await asked("pause", {"mode": "keep"}))[0] == ("/pause_generation", {"mode": "retract"})
    assert (await asked("pause", {"mode": "abort"}))[0] == ("/pause_generation", {"mode": "abort"})
    assert sglang_mode("keep") == "retract"


@pytest.mark.parametrize("mode", ["wait", "in_place", "retract", 7])
async def test_a_mode_that_sglang_does_not_know_is_refused_before_anybody_is_asked(mode: object) -> None:
    told = Told()
    async with servers(told) as made:
        with pytest.raises(ConfigurationError):
            await made.carry_out(Order("id", "pause", {"mode": mode}, 5.0))
    assert told == []


async def test_a_path_under_the_folder_of_checkpoints_is_loaded_as_safetensors() -> None:
    body = {"model_path": "/ckpt/run/step-4", "weight_version": "4"}
    told = await asked("update_from_disk", body, checkpoints="/ckpt")
    assert told == [("/update_weights_from_disk", body | {"load_format": "safetensors"})]


@pytest.mark.parametrize(
    "path",
    ["evil-org/repo", "/ckpt/../etc", "/ckptother/a", "/", "", "ckpt/a", "hf://a", "/ckpt/a\n", "/ckpt/a/../../b", "s3://ckpt/a"],
)
async def test_any_other_path_is_refused(path: str) -> None:
    told = Told()
    async with servers(told, checkpoints="/ckpt") as made:
        with pytest.raises(ConfigurationError):
            await made.carry_out(Order("id", "update_from_disk", {"model_path": path}, 5.0))
    assert told == []


async def test_without_a_folder_nothing_is_loaded_from_disk() -> None:
    told = Told()
    async with servers(told) as made:
        with pytest.raises(ConfigurationError, match="checkpoints="):
            await made.carry_out(Order("id", "update_from_disk", {"model_path": "/ckpt/a"}, 5.0))
    assert told == []
    with pytest.raises(ConfigurationError, match="absolute"):
        UpdateServers({"a": Server("http://a")}, checkpoints="ckpt")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("update_from_disk", {"model_path": "/ckpt/a", "load_format": "pt"}),
        ("update_from_disk", {"model_path": "/ckpt/a", "anything": 1}),
        ("update_from_distributed", BUCKET | {"load_format": "pickle"}),
        ("update_from_distributed", BUCKET | {"serialized_named_tensors": ["x"]}),
        ("init_group", GROUP | {"more": 1}),
        ("init_group", GROUP | {"master_port": 0}),
        ("destroy_group", {"group_name": "g", "more": 1}),
        ("pause", {"mode": "abort", "more": 1}),
        ("continue", {"more": 1}),
    ],
)
@pytest.mark.parametrize("engine", ["sglang", "weightsync"])
async def test_no_field_goes_to_servers_that_an_order_does_not_have(kind: str, body: dict[str, Any], engine: str) -> None:
    told = Told()
    async with servers(told, engine, "/ckpt") as made:
        with pytest.raises(ConfigurationError, match="invalid body"):
            await made.carry_out(Order("id", kind, body, 5.0))
    assert told == []


async def test_what_servers_are_told() -> None:
    assert await asked("update_from_distributed", BUCKET | {"finished": True, "weight_version": "4"}) == [
        ("/update_weights_from_distributed", BUCKET | {"weight_version": "4", "flush_cache": True, "abort_all_requests": False})
    ]
    assert await asked("update_from_distributed", BUCKET | {"finished": True, "load_format": None}, engine="weightsync") == [
        ("/update_weights_from_distributed", BUCKET | {"load_format": None})
    ]
    assert await asked("init_group", GROUP | {"world_size": 2}) == [
        ("/init_weights_update_group", GROUP | {"world_size": 2, "rank_offset": 1})
    ]
    begin = {"weight_version": None, "manifest": None, "mode": "wait", "timeout": None}
    assert await asked("pause", {"mode": "wait"}, engine="weightsync") == [("/begin_weight_update", begin)]
    assert [path for path, _ in await asked("continue", {})] == ["/end_weight_update", "/continue_generation"]
    assert await asked("destroy_group", {"group_name": "g"}) == [("/destroy_weights_update_group", {"group_name": "g"})]

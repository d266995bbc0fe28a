"""Holds generation over HTTP: vLLM's and OpenAI's streams, aborts, servers that die or talk nonsense, disconnecting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from examples.demo.completions import completions_app
from examples.demo.gate import Gate
from examples.demo.generation import Completion
from examples.demo.tokenizer import build_tokenizer
from tests.unit.rollouts.engines import status

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, LoadError, PeerLost, ProtocolError
from weightsync_rollouts import Chunk, Completions, Generation, RolloutController, RolloutSettings, Sample, Sampling, VllmTokens

SECONDS = 20.0
Answer = Callable[[str, dict[str, Any], asyncio.StreamWriter, asyncio.StreamReader], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """A server that hands each request to ``answer`` and then closes the connection, without another word."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            size = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0)
            body = json.loads(await reader.readexactly(size) or b"{}")
            await answer(head.split(" ")[1], body, writer, reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()


def begin(writer: asyncio.StreamWriter, code: int = 200, kind: str = "text/event-stream") -> None:
    writer.write(f"HTTP/1.1 {code} X\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())


def part(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def event(writer: asyncio.StreamWriter, content: object) -> None:
    part(writer, b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n")


def end(writer: asyncio.StreamWriter) -> None:
    event(writer, b"[DONE]")
    part(writer, b"")


def vllm_chunk(tokens: list[int], finish: str | None = None, spans: list[tuple[str, int, int]] | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "token_ids": tokens, "finish_reason": finish}
    choice["logprobs"] = {"content": [{"token_id": token, "logprob": -float(token), "top_logprobs": []} for token in tokens]}
    if spans is not None:
        choice["weight_versions"] = [{"version": version, "start": start, "end": stop} for version, start, stop in spans]
    return {"request_id": "r", "choices": [choice]}


async def collect(generation: Generation, url: str, sampling: Sampling = Sampling(max_tokens=8)) -> list[Chunk]:  # noqa: B008 - frozen
    async with asyncio.timeout(SECONDS):
        return [chunk async for chunk in generation.stream(url, [7], sampling.max_tokens, sampling)]


async def test_vllm_interrupted_and_gone_on_with() -> None:
    """The real controller and client: an abort with spans over two versions, then the rest from where it was."""
    asked: list[dict[str, Any]] = []

    async def answer(path: str, body: dict[str, Any], writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        assert path == "/inference/v1/generate"
        asked.append(body)
        begin(writer)
        if len(asked) == 1:
            event(writer, vllm_chunk([1, 2]))
            event(writer, vllm_chunk([3], "abort", [("run@4", 0, 2), ("run@5", 2, 3)]))
        else:
            event(writer, vllm_chunk([4], "stop", [("run@6", 0, 1)]))
        end(writer)
        await writer.drain()

    async def task(generate: Any) -> Sample:
        sample: Sample = await generate([7, 8], Sampling(max_tokens=10, seed=100, stop_token_ids=(4,)))
        return sample

    async with serving(answer) as url:
        settings = RolloutSettings(batch=1, task_seconds=SECONDS)
        async with RolloutController[Sample](settings, VllmTokens(model="m"), {"a": url}) as rollouts:
            rollouts.publish(4)
            rollouts.replicas.apply(status(4, a=4))
            rollouts.submit(task)
            (rollout,) = await rollouts.batch(SECONDS)
    assert [(body["token_ids"], body["sampling_params"]["max_tokens"], body["sampling_params"]["seed"]) for body in asked] == [
        ([7, 8], 10, 100),
        ([7, 8, 1, 2, 3], 7, 103),
    ]
    sample = rollout.value
    assert (sample.tokens, sample.versions, sample.logprobs) == ([1, 2, 3, 4], [4, 4, 5, 6], [-1.0, -2.0, -3.0, -4.0])
    assert (sample.finish_reason, sample.interruptions, sample.lost_tokens) == ("stop", 1, 0)


async def test_what_a_dying_server_did_not_report_is_dropped() -> None:
    async def answer(path: str, body: dict[str, Any], writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        begin(writer)
        event(writer, vllm_chunk([1, 2]))
        await writer.drain()

    async with serving(answer) as url, VllmTokens() as vllm:
        got: list[Chunk] = []
        with pytest.raises(PeerLost, match=url):
            async for chunk in vllm.stream(url, [7], 8, Sampling(max_tokens=8)):
                got.append(chunk)
        sample = Sample((7,))
        sample.keep("a", got)
    assert (sample.tokens, sample.logprobs, sample.lost_tokens) == ([], [], 2)


async def test_a_server_that_reports_as_it_goes_loses_nothing_when_it_dies() -> None:
    async def answer(path: str, body: dict[str, Any], writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        if path == "/weight_info":
            writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")
            return
        begin(writer)
        for token in (1, 2):
            choice = {"index": 0, "token_ids": [token], "logprobs": {"token_logprobs": [-0.5]}}
            event(writer, {"choices": [choice], "weightsync": {"token_versions": [3]}})
        await writer.drain()

    async with serving(answer) as url, Completions() as completions:
        got: list[Chunk] = []
        with pytest.raises(PeerLost):
            async for chunk in completions.stream(url, [7], 8, Sampling(max_tokens=8)):
                got.append(chunk)
        sample = Sample((7,))
        sample.keep("a", got)
    assert (sample.tokens, sample.logprobs, sample.versions) == ([1, 2], [-0.5, -0.5], [3, 3])


@pytest.mark.parametrize(("labels", "kept"), [(["run@3", "run@3"], [3, 3]), (["run@3", "run@4"], []), (["none", "none"], [])])
async def test_a_plain_server_is_believed_only_if_it_says_the_same_before_and_after(labels: list[str], kept: list[int]) -> None:
    said = iter(labels)

    async def answer(path: str, body: dict[str, Any], writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        if path == "/weight_info":
            begin(writer, kind="application/json")
            part(writer, json.dumps({"weight_version": next(said)}).encode())
            part(writer, b"")
            return
        begin(writer)
        choice = {"index": 0, "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1, -1]}, "finish_reason": "stop"}
        event(writer, {"choices": [choice]})
        end(writer)
        await writer.drain()

    async with serving(answer) as url, Completions() as completions:
        sample = Sample((7,))
        sample.keep("a", await collect(completions, url))
    assert (sample.versions, sample.lost_tokens) == (kept, 2 - len(kept))


async def test_closing_the_stream_disconnects() -> None:
    gone = asyncio.Event()

    async def answer(path: str, body: dict[str, Any], writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        begin(writer)
        event(writer, vllm_chunk([1]))
        await writer.drain()
        assert await reader.read(1) == b""
        gone.set()

    async def task(generate: Any) -> Sample:
        sample: Sample = await generate([7], Sampling(max_tokens=2))
        return sample

    settings = RolloutSettings(batch=1, task_seconds=0.3)
    async with serving(answer) as url, RolloutController[Sample](settings, VllmTokens(), {"a": url}) as rollouts:
        rollouts.publish(1)
        rollouts.replicas.apply(status(1, a=1))
        rollouts.submit(task)
        async with asyncio.timeout(SECONDS):
            await gone.wait()


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (400, b"no such token", LoadError),
        (401, b"", LoadError),
        (503, b"paused", PeerLost),
        (500, b"", PeerLost),
        (200, b"data: {\n\n", ProtocolError),
        (200, b"data: {\"choices\": 3}\n\n", ProtocolError),
        (200, b"", PeerLost),
    ],
)  # fmt: skip
async def test_bad_answers(code: int, said: bytes, expected: type[Exception]) -> None:
    async def answer(path: str, body: dict[str, Any], writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        begin(writer, code)
        if said:
            part(writer, said)
        part(writer, b"")
        await writer.drain()

    async with serving(answer) as url, VllmTokens() as vllm:
        with pytest.raises(expected, match=url if expected is not ProtocolError else "sent an unreadable message"):
            await collect(vllm, url)


async def test_an_endless_message_is_refused() -> None:
    async def answer(path: str, body: dict[str, Any], writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        begin(writer)
        for _ in range(8):
            part(writer, b"x" * (1 << 20))
            await writer.drain()

    async with serving(answer) as url, VllmTokens() as vllm:
        with pytest.raises(ProtocolError, match="more than"):
            await collect(vllm, url)


async def test_nobody_there_and_no_url() -> None:
    async with VllmTokens() as vllm, Completions() as completions:
        for generation in (vllm, completions):
            with pytest.raises(PeerLost):
                await collect(generation, "http://127.0.0.1:1")
        with pytest.raises((ConfigurationError, PeerLost)):
            await collect(vllm, "http://[")


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Sample((1,)).keep("a", [Chunk((1,), None, (1, 1))])
    with pytest.raises(ProtocolError):
        Sample((1,)).keep("a", [Chunk((1, 2), (-1.0,), (1, 1))])
    sample = Sample((1,))
    sample.keep("a", [Chunk((1,), (-1.0,), (1,))])
    with pytest.raises(ProtocolError, match="log-probabilities"):
        sample.keep("b", [Chunk((1,), None, (1,))])


async def test_the_demos_server() -> None:
    """What the demo's replicas answer, read by the client that the guide names for them."""
    asked: list[tuple[list[int], int]] = []

    class Generator:
        def __init__(self) -> None:
            self.gate = Gate()

        def complete(self, prompt: Sequence[int], budget: int, deadline: Deadline, adapter: str = "") -> Completion:
            asked.append((list(prompt), budget))
            if len(asked) == 1:
                return Completion([5, 6], [1, 1], [0, 0], [0], "abort")
            return Completion([7], [2], [0], [0], "stop")

    app = completions_app("a", Generator(), build_tokenizer(0))
    completions = Completions(stream=False)
    await completions.aclose()
    completions._http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    settings = RolloutSettings(batch=1, task_seconds=SECONDS)

    async def task(generate: Any) -> Sample:
        sample: Sample = await generate([3, 4], Sampling(max_tokens=9, temperature=0, logprobs=False))
        return sample

    async with RolloutController[Sample](settings, completions, {"a": "http://a"}) as rollouts:
        rollouts.publish(1)
        rollouts.replicas.apply(status(1, a=1))
        rollouts.submit(task)
        (rollout,) = await rollouts.batch(SECONDS)
    assert asked == [([3, 4], 9), ([3, 4, 5, 6], 7)]
    assert (rollout.value.tokens, rollout.value.versions, rollout.value.finish_reason) == ([5, 6, 7], [1, 1, 2], "stop")

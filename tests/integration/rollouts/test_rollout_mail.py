"""Holds completions through a real coordinator: pushed, at least once, no duplicates, connections lost meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
from tests.integration.server.service_support import fast, free_port

from weightsync.config import Address, ClientSettings, Secret, ServerSettings
from weightsync.errors import AuthenticationError, ConfigurationError, CoordinatorUnreachable, MembershipError
from weightsync.server.server import BackgroundServer
from weightsync_callbacks import broker
from weightsync_callbacks.mail import CompletionReceiver, CompletionSender
from weightsync_callbacks.mailbox import Signal

SECONDS = 20.0


@pytest.fixture
def server(runtime: None) -> Iterator[BackgroundServer]:
    """A coordinator with the mailboxes for rollouts."""
    with BackgroundServer(ServerSettings(port=0, run="run", heartbeat=0.3, mounts=("rollouts",))) as server:
        yield server


async def take(signals: AsyncIterator[Signal], count: int) -> list[Signal]:
    async with asyncio.timeout(SECONDS):
        return [await anext(signals) for _ in range(count)]


class Wire:
    """A proxy in between, whose connections a test can cut."""

    def __init__(self, to: Address) -> None:
        self.to = to
        self.writers: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        both = {writer}
        self.writers.add(writer)
        try:
            there, back = await asyncio.open_connection(self.to.host, self.to.port)
            both.add(back)
            self.writers.add(back)
            await asyncio.gather(self._carry(reader, back), self._carry(there, writer))
        finally:
            for writer in both:
                writer.transport.abort()

    @staticmethod
    async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        target.close()

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Address]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield Address("http", "127.0.0.1", server.sockets[0].getsockname()[1])
        finally:
            server.close()
            carrying = list(self._carrying)
            for task in carrying:  # also one that is just connecting, which no cut can reach
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)
            await asyncio.sleep(0)  # sockets of aborted connections are closed by the loop's next step


async def test_pushed_fetched_acknowledged(settings: ClientSettings) -> None:
    async with CompletionReceiver(settings) as receiver, CompletionSender(settings) as sender:
        signals = aiter(receiver)
        names = [sender.send({"number": number, "tokens": [1, 2, 3]}) for number in range(50)]
        sender.send("again", names[0])  # the same rollout, reported twice
        got = await take(signals, 50)
        assert [signal.id for signal in got] == names
        assert await receiver.fetch(got[7]) == {"number": 7, "tokens": [1, 2, 3]}
        assert (await receiver.fetch(got[0]))["number"] == 0
        await receiver.acknowledge(got[48])
        with pytest.raises(MembershipError):
            await receiver.fetch(got[7])
    async with CompletionReceiver(settings) as later:  # a trainer that was restarted hears of what it did not take
        assert [signal.id for signal in await take(aiter(later), 1)] == names[49:]


async def test_lost_connections_lose_and_repeat_nothing(settings: ClientSettings, server: BackgroundServer) -> None:
    wire = Wire(settings.coordinator)
    async with wire.open() as address:
        where = fast(address, Secret(server.token))
        async with CompletionReceiver(where) as receiver, CompletionSender(where) as sender:
            signals = aiter(receiver)
            sent: list[str] = []
            got: list[str] = []
            for _ in range(5):
                sent += [sender.send(number) for number in range(20)]
                wire.cut()
                got += [signal.id for signal in await take(signals, 20)]
                wire.cut()
            assert got == sent


async def test_sent_while_there_is_no_coordinator() -> None:
    token = Secret("t" * 32)
    where = fast(Address("http", "127.0.0.1", free_port()), token)
    async with CompletionReceiver(where) as receiver, CompletionSender(where) as sender:
        name = sender.send({})
        coming = asyncio.ensure_future(take(aiter(receiver), 1))
        await asyncio.sleep(0.1)
        assert not coming.done()
        server = BackgroundServer(ServerSettings(port=where.coordinator.port, token=token, heartbeat=0.3, mounts=("rollouts",)))
        await asyncio.to_thread(server.start)
        try:
            assert [signal.id for signal in await coming] == [name]
        finally:
            await asyncio.to_thread(server.stop)
    with pytest.raises(CoordinatorUnreachable, match=where.coordinator.url):
        async with CompletionSender(where, flush_seconds=0.2) as sender:
            sender.send({})


async def test_a_wrong_token_is_told(settings: ClientSettings) -> None:
    wrong = fast(settings.coordinator, Secret("wrong"))
    async with CompletionReceiver(wrong) as receiver:
        with pytest.raises(AuthenticationError):
            await take(aiter(receiver), 1)
    with pytest.raises(AuthenticationError):
        async with CompletionSender(wrong) as sender:
            sender.send({})


async def test_a_coordinator_by_itself_has_no_mailboxes_and_says_how_to_get_them(runtime: None) -> None:
    with BackgroundServer(ServerSettings(port=0)) as plain:
        async with CompletionReceiver(fast(plain.address)) as receiver:
            with pytest.raises(ConfigurationError, match="--mount rollouts"):
                await take(aiter(receiver), 1)


def test_an_unknown_mount_is_refused_before_anything_listens(runtime: None) -> None:
    with pytest.raises(ConfigurationError, match=r"routes named 'rollout'.*installed: rollouts"):
        BackgroundServer(ServerSettings(port=0, mounts=("rollout",))).start()


async def test_bodies_that_are_received_take_a_bounded_memory(
    settings: ClientSettings, server: BackgroundServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the token: 64 requests of 64 MiB that do not end."""
    monkeypatch.setattr(broker, "_BODIES_BYTES", 1 << 20)
    post = (
        f"POST /v1/rollouts/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
        "Content-Length: 700000\r\n\r\n"
    ).encode()
    writers = []
    try:
        answers = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
            writers.append(writer)
            writer.write(post + b"x" * 600_000)
            await writer.drain()
            answers.append(asyncio.ensure_future(reader.readline()))
        done, unanswered = await asyncio.wait(answers, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert [answer.result().split()[1] for answer in done] == [b"503"]
        for answer in unanswered:
            answer.cancel()
    finally:
        for writer in writers:
            writer.close()
    async with CompletionSender(settings) as sender:
        sender.send("room again")

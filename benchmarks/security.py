"""What the protection costs: ``python -m benchmarks.security`` prints the tables of docs/benchmarks/security.md.

``python -m benchmarks.security tls`` measures floods of a coordinator over TLS alone, five times (3 minutes).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import trustme
from tests.integration.server.test_service_limits import FLOOD

import weightsync
from weightsync.deadline import Deadline
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_host
from weightsync.transports.tcp.transport import Tcp

MIB = 1 << 20


def key_cost(connections: int = 300) -> None:
    """A connection that proves itself, against a bare one."""
    region, key, here = PublishedRegion(4096, "layout"), secrets.token_bytes(32), this_host()
    owner = Tcp().publish(region, key, here)
    proved, bare = [], []
    try:
        where = owner.offer.address.partition("/")[0].rpartition(":")
        for _ in range(connections):
            started = time.perf_counter()
            Tcp().open(owner.offer, key, Deadline(10)).close()
            proved.append(time.perf_counter() - started)
            started = time.perf_counter()
            socket.create_connection((where[0], int(where[2])), timeout=10).close()
            bare.append(time.perf_counter() - started)
    finally:
        owner.close()
        region.close()
    print(f"connection: bare {1e3 * statistics.median(bare):.2f} ms, proved {1e3 * statistics.median(proved):.2f} ms; bytes: none")


TLS_FLOOD = """
import socket, ssl, sys, time
host, port, seconds, whole = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "whole"
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
try:
    context.wrap_bio(incoming, outgoing).do_handshake()
except ssl.SSLWantReadError:
    hello = outgoing.read()
ends = time.monotonic() + seconds
while time.monotonic() < ends:
    try:
        with socket.create_connection((host, port), timeout=2) as sock:
            if whole:
                context.wrap_socket(sock).close()
            else:
                sock.sendall(hello)
                sock.recv(10)
    except OSError:
        pass
"""
"""A flood of TLS handshakes: whole ones, or the first message only, which has the server do its expensive part."""


@contextlib.contextmanager
def flood(port: int, kind: str) -> Iterator[None]:
    """Strangers that connect as fast as they can and ask (``http``), or shake hands (``whole``, ``hello``)."""
    program = [FLOOD, "127.0.0.1", str(port), "600"] if kind == "http" else [TLS_FLOOD, "127.0.0.1", str(port), "600", kind]
    with subprocess.Popen([sys.executable, "-c", *program], stdout=subprocess.DEVNULL) as running:
        try:
            time.sleep(1.0)
            yield
        finally:
            running.kill()


@contextlib.contextmanager
def coordinator(tls: bool) -> Iterator[str]:
    """In a process of its own, as in real life. Over TLS with an RSA key, as most certificates have."""
    with contextlib.ExitStack() as undo:
        environment = dict(os.environ)
        os.environ.pop("WEIGHTSYNC_CA_FILE", None)
        if tls:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            authority = trustme.CA()
            issued = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.RSA)
            for name, pem in (("CERTIFICATE", issued.cert_chain_pems[0]), ("KEY", issued.private_key_pem)):
                pem.write_to_path(folder / name)
                environment[f"WEIGHTSYNC_TLS_{name}"] = str(folder / name)
            authority.cert_pem.write_to_path(folder / "authority")
            os.environ["WEIGHTSYNC_CA_FILE"] = str(folder / "authority")
        command = [sys.executable, "-m", "weightsync", "serve", "--port", "0"]
        child = undo.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        )
        try:
            address = re.search(r"https?://\S+", (child.stdout or sys.stdin).readline())
            yield address[0] if address else ""
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait(20)


def rounds(nbytes: int, count: int, turns: int, encrypted: bool, tls: bool = False) -> dict[str, float]:
    """Rounds in turns: quiet, flooded in one way, quiet, flooded in another. Returns the ratio for each kind of flood."""
    os.environ["WEIGHTSYNC_DATA_ENCRYPTION"] = "on" if encrypted else "off"
    state = {"w": torch.randn(max(nbytes // 4, 4))}
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.zeros_like(state["w"]), requires_grad=False))
    numbers = iter(range(1, 100_000))
    with coordinator(tls) as url, weightsync.Trainer(state, url, transports=["tcp"]) as trainer:
        ports = {
            "coordinator": int(url.rpartition(":")[2]),
            "data socket": int(trainer._role.offers[0].address.partition("/")[0].rpartition(":")[2]),
        }
        kinds = [(port, "http") for port in ports]
        if encrypted or tls:
            kinds = [("coordinator" if tls else "data socket", kind) for kind in ("hello", "whole")]
        with weightsync.Engine(weightsync.ModuleAdapter(model), "r", url, transports=["tcp"]):

            def some() -> list[float]:
                taken = []
                for _ in range(count):
                    started = time.perf_counter()
                    trainer.publish(next(numbers), timeout=60)
                    taken.append(time.perf_counter() - started)
                return taken

            some()
            quiet: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
            flooded: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
            for _ in range(turns):
                for kind in kinds:
                    quiet[kind] += some()
                    with flood(ports[kind[0]], kind[1]):
                        flooded[kind] += some()
            ratios = {}
            for port, how in kinds:
                before, beside = statistics.median(quiet[port, how]), statistics.median(flooded[port, how])
                ratios[how] = beside / before
                protection = "encrypted" if encrypted else "coordinator over TLS" if tls else "in clear"
                print(
                    f"{nbytes // MIB:4} MiB {protection}, {port} flooded ({how}): quiet "
                    f"{1e3 * before:.1f} ms, flooded {1e3 * beside:.1f} ms = {beside / before:.2f} times "
                    f"({len(quiet[port, how])} rounds each; load {os.getloadavg()[0]:.1f})",
                    flush=True,
                )
            return ratios


def tls_coordinator(runs: int = 5) -> None:
    """Print the median and the spread of several runs."""
    for nbytes, count, turns in ((0, 40, 3), (128 * MIB, 4, 3)):
        ratios = [rounds(nbytes, count, turns, encrypted=False, tls=True) for _ in range(runs)]
        for how in ratios[0]:
            values = [ratio[how] for ratio in ratios]
            print(
                f"{nbytes // MIB:4} MiB, coordinator over TLS flooded ({how}): {statistics.median(values):.2f} times, "
                f"{min(values):.2f} to {max(values):.2f} in {runs} runs"
            )


def main() -> None:
    """Print everything."""
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if sys.argv[1:] == ["tls"]:
        tls_coordinator()
        return
    key_cost()
    for encrypted in (False, True):
        rounds(0, 20, 6, encrypted)
        rounds(128 * MIB, 5, 10, encrypted)


if __name__ == "__main__":
    main()

"""The same store over S3, as moto serves it. AWS itself was not tested."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest
import torch
from tests.unit.store.stored import RUN, StoringTrainer, change, large_state

from weightsync.deadline import Deadline
from weightsync.errors import StaleSource, TransportError
from weightsync.store.catalog import collect_garbage, load, newest, orders
from weightsync.store.objects import ObjectStore
from weightsync.store.restore import check_object, tensors_of

SECONDS = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = pytest.importorskip("moto.server")
    served = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    host, port = served.get_host_and_port()
    with urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST"), timeout=SECONDS):
        pass  # its objects belong to the process, in which another module's tests may have stored some
    yield f"http://{host}:{port}"
    served.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in (("ENDPOINT_URL", server), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with urlopen(Request(f"{server}/bucket", method="PUT"), timeout=SECONDS):
        pass
    return "s3://bucket/a/prefix"


def test_versions_come_back_from_s3(bucket: str) -> None:
    state = large_state()
    trainer = StoringTrainer(bucket, state, 2)
    for number, share in enumerate((1.0, 0.01, 0.01)):
        change(state, share, number)
        trainer.publish(number)
    assert trainer.kinds[1:] == [("delta", "delta")] * 2 and orders(trainer.store, RUN) == [(1, 0), (1, 1), (1, 2)]
    version = newest(trainer.store, RUN, trainer.key.public)
    assert version is not None
    read = {spec.name: data.tobytes() for part in tensors_of(trainer.store, version, Deadline(SECONDS)) for spec, data in part}
    assert read == {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}
    for item in version.objects.values():
        check_object(trainer.store, item)
    assert len(collect_garbage(trainer.store, RUN, trainer.key.public, 1, grace=0).versions) == 2
    assert trainer.store.folders() == (RUN,)
    assert load(trainer.store, RUN, (1, 2), trainer.key.public).version == version.version


def test_a_manifest_is_created_once(bucket: str) -> None:
    store = ObjectStore(bucket)
    assert store.create("once", b"first") and not store.create("once", b"second")
    assert bytes(store.read("once", 0, 99)) == b"first"
    with pytest.raises(StaleSource):
        store.read("never", 0, 1)
    store.delete("never")


def test_a_failure_of_the_iterator_leaves_no_object(bucket: str) -> None:
    from weightsync.errors import Aborted

    store = ObjectStore(bucket)

    def parts() -> Iterator[bytes]:
        yield bytes(9 << 20)
        raise Aborted("the version was overtaken")

    with pytest.raises((Aborted, TransportError)):
        store.put("half", parts())
    assert "half" not in [item.path for item in store.list()]


def test_a_bucket_that_is_not_there_is_a_transport_error(bucket: str) -> None:
    with pytest.raises((TransportError, StaleSource)):
        ObjectStore("s3://another-bucket").create("a", b"")

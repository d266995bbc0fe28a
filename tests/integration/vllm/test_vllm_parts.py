"""The vLLM adapter's parts that need no vLLM: checkpoints, staging, and the control routes, over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from weightsync.deadline import Deadline
from weightsync.engines.hf_checkpoint import HfCheckpoint, checkpoint_of
from weightsync.engines.staged_adapter import UNLABELLED
from weightsync.engines.vllm.adapter import VllmWorkerAdapter
from weightsync.engines.vllm.controls import Controls, HttpControls
from weightsync.engines.vllm.loading import load_in_sessions
from weightsync.engines.vllm.local_controls import ControlsServer, LocalControls, controls_at, is_local
from weightsync.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceeded,
    LoadError,
    ManifestMismatch,
    MembershipError,
    PeerLost,
    VerificationError,
    WeightSyncError,
)
from weightsync.model import Manifest, PauseMode, TensorSpec, Version
from weightsync.tensors.digest import digest_box
from weightsync.tensors.shards import manifest_of
from weightsync.transports.broadcast.process_groups import StoreRendezvous, init_custom_process_group
from weightsync.transports.host.unix_socket import connect_local
from weightsync_disaggregated.push_receiver import PushedUpdates

CPU = torch.device("cpu")
VERSION = Version("run", 7, "0" * 32, "0" * 16)


def model(tied: bool) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=11, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    torch.nn.Module.to(made, dtype=torch.bfloat16)
    return made


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("largest", ["1GB", "20KB"])
def test_a_checkpoint_says_what_a_trainers_model_says(tmp_path: Path, tied: bool, largest: str) -> None:
    made = model(tied)
    made.save_pretrained(tmp_path, max_shard_size=largest)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (largest == "20KB")
    found = checkpoint_of(str(tmp_path), None, made.config)
    assert found.manifest == manifest_of(made)
    assert ("lm_head.weight" in found.names) is not tied


def test_without_files_the_configuration_says_it(tmp_path: Path) -> None:
    made = model(True)
    made.config.dtype = torch.bfloat16
    assert checkpoint_of(str(tmp_path), None, made.config).manifest == manifest_of(made)
    with pytest.raises(ConfigurationError, match="tensors of this engine are unknown"):
        checkpoint_of(str(tmp_path), None, object())
    made.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(ConfigurationError, match="or none with its quantized tensors"):
        checkpoint_of(str(tmp_path), None, made.config)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"a": {} }']
)
def test_a_file_that_is_no_safetensors_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors"):
        checkpoint_of(str(tmp_path), None, object())


def test_a_foreign_model_is_known_by_its_files(tmp_path: Path) -> None:
    save_file({"odd.weight": torch.zeros(3, 5, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    found = checkpoint_of(str(tmp_path), None, object())
    assert found.manifest == Manifest([TensorSpec("odd.weight", (3, 5), "float8_e4m3fn")])


class Fake:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: str | None = None
        self.flushed = True
        self.hold = threading.Event()
        self.hold.set()

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.fail == call:
            self.fail = None
            raise RuntimeError(f"injected into {call}")

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self._note(f"pause {mode}")
        self.hold.wait(5)

    def install(self, timeout: float) -> None:
        self._note("install")

    def flush(self, timeout: float) -> bool:
        self._note("flush")
        return self.flushed

    def label(self, version: str, timeout: float) -> None:
        self._note(f"label {version}")

    def resume(self, timeout: float) -> None:
        self._note("resume")
        self.hold.wait(5)
        self.calls.append("resumed")


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture(params=["this process", "another process"])
def controls(fake: Fake, no_leaks: None, request: pytest.FixtureRequest) -> Iterator[Controls]:
    with ControlsServer(fake) as server:
        yield controls_at(server.address) if request.param == "this process" else LocalControls(server.address)


def test_the_process_that_owns_the_engine_is_handed_its_own_controls(fake: Fake, no_leaks: None) -> None:
    with ControlsServer(fake) as server:
        assert is_local(server.address)
        assert controls_at(server.address) is fake
    assert isinstance(controls_at(server.address), LocalControls)
    assert isinstance(controls_at("http://host:8000"), HttpControls)


def test_controls_reach_their_owner(fake: Fake, controls: Controls) -> None:
    for mode in ("abort", "wait", "keep"):
        controls.pause(mode, 5)
    controls.install(5)
    assert controls.flush(5) is True
    fake.flushed = False
    assert controls.flush(5) is False
    controls.label("run@7", 5)
    controls.resume(5)
    assert fake.calls == [
        "pause abort", "pause wait", "pause keep", "install", "flush", "flush", "label run@7", "resume", "resumed",
    ]  # fmt: skip


def test_a_call_that_failed_can_be_tried_again(fake: Fake, controls: Controls) -> None:
    fake.fail = "install"
    with pytest.raises(Exception, match="injected into install"):
        controls.install(5)
    controls.install(5)
    assert fake.calls == ["install", "install"]


class FakeWorker:
    """Keeps vLLM's rules: a session is opened once, an update needs one, and ends it if it fails."""

    def __init__(self, failing: str | None = None) -> None:
        self.loaded: list[str] = []
        self.session: str | None = None
        self.failing = failing

    def _start(self, model: str) -> None:
        if self.session is not None:
            raise RuntimeError("already active")
        self.session = model

    def start_weight_update(self) -> None:
        self._start("main")

    def start_draft_weight_update(self) -> None:
        self._start("draft")

    def update_weights(self, update_info: dict[str, object]) -> None:
        if self.session is None:
            raise RuntimeError("start comes first")
        if self.session == self.failing:
            self.session = None
            raise LoadError("injected")
        self.loaded.append(self.session)

    def finish_weight_update(self) -> None:
        if self.session is None:
            raise RuntimeError("not active")
        self.session = None


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("left_open", [None, "main", "draft"])
def test_a_worker_loads_in_sessions_of_its_own(draft: bool, left_open: str | None) -> None:
    worker = FakeWorker()
    worker.session = left_open
    load_in_sessions(worker, draft=draft)
    assert worker.loaded == ["draft", "main"][not draft :]
    assert worker.session is None


@pytest.mark.parametrize("failing", ["main", "draft"])
def test_a_worker_that_failed_has_no_session_open(failing: str) -> None:
    worker = FakeWorker(failing)
    with pytest.raises(LoadError, match="injected"):
        load_in_sessions(worker, draft=True)
    assert worker.session is None
    worker.failing = None
    load_in_sessions(worker, draft=True)
    assert worker.loaded[-2:] == ["draft", "main"]


def test_a_call_that_was_given_up_neither_overtakes_a_later_one_nor_runs_after_it(fake: Fake, no_leaks: None) -> None:
    with ControlsServer(fake) as server, ThreadPoolExecutor(2) as workers:
        controls = LocalControls(server.address)
        fake.hold.clear()
        with pytest.raises(DeadlineExceeded, match="resume"):
            controls.resume(0.2)  # it hangs in the engine
        with pytest.raises(DeadlineExceeded, match=r"resume is still running|did not answer flush"):
            controls.flush(0.2)  # it never gets its turn
        pausing = workers.submit(controls.pause, "abort", 5.0)
        fake.hold.set()
        pausing.result(5)
        assert fake.calls == ["resume", "resumed", "pause abort"]


def test_a_pause_and_its_label_share_one_timeout(fake: Fake) -> None:
    spent: list[float] = []
    fake.label = lambda version, timeout: spent.append(timeout)  # type: ignore[method-assign]
    fake.hold.clear()
    threading.Timer(0.2, fake.hold.set).start()
    VllmWorkerAdapter(HfCheckpoint(Manifest([TensorSpec("a", (4,), "float32")]), ("a",)), fake).pause("keep", 3)
    assert spent[0] < 2.9


def test_strangers_slow_engines_and_nobody(fake: Fake, no_leaks: None) -> None:
    with ControlsServer(fake) as server:
        place = server.address.partition(":")[0]
        with pytest.raises((AuthenticationError, PeerLost)):
            LocalControls(f"{place}:{'0' * 64}").resume(5)
        with pytest.raises(ConfigurationError, match="key"):
            LocalControls(f"{place}:guess")
        fake.hold.clear()
        with pytest.raises(DeadlineExceeded, match="pause"):
            LocalControls(server.address).pause("abort", 0.2)
        fake.hold.set()
    assert "resume" not in fake.calls
    with pytest.raises(PeerLost, match="does not listen"):
        LocalControls(server.address).resume(5)


@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="http://host:port"):
        HttpControls(url)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"nonsense\r\n\r\n", PeerLost),
        (b"", PeerLost),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"succe', PeerLost),  # ended too early
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", LoadError),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", LoadError),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n{"success": false}', LoadError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[1]", None),  # no answer that counts
    ],
)
def test_whatever_is_answered_is_no_success_or_one_of_our_errors(said: bytes, error: type[WeightSyncError] | None) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as other:
        answering = other.submit(answer)
        controls = HttpControls(f"http://127.0.0.1:{listener.getsockname()[1]}/below")
        if error is None:
            assert controls.flush(5) is False
        else:
            with pytest.raises(error, match="reset_prefix_cache") as raised:
                controls.flush(5)
            assert type(raised.value) is error
        answering.result(5)


def test_what_is_no_call_is_refused(fake: Fake, no_leaks: None) -> None:
    with ControlsServer(fake) as server:
        place, _, key = server.address.partition(":")
        for data in (b"nonsense" * 8, b"\xff" * 64):  # more than a header
            with closing(connect_local("weightsync-vllm-", place, bytes.fromhex(key), "owner", Deadline(5))) as channel:
                channel.send([data], Deadline(5))
                with pytest.raises(PeerLost):
                    channel.receive(1, Deadline(5))
    assert fake.calls == []


def test_a_rank_stages_lends_nothing_and_resumes_only_what_it_loaded(fake: Fake, controls: Controls) -> None:
    specs = [TensorSpec("a", (4,), "float32", ("tied",)), TensorSpec("b", (2, 2), "bfloat16")]
    adapter = VllmWorkerAdapter(HfCheckpoint(Manifest(specs), ("b", "a", "tied")), controls)
    adapter.pause("keep", 5)
    lent = torch.arange(4.0)
    adapter.load(iter([("a", lent)]))
    lent.zero_()
    with pytest.raises(LoadError, match="1 tensors were not received: b"):
        adapter.finish(VERSION)
    adapter.load(iter([("b", torch.ones(2, 2, dtype=torch.bfloat16))]))
    adapter.finish(VERSION)
    with pytest.raises(LoadError, match="did not load"):
        adapter.resume()
    staged = dict(adapter.staged())
    assert list(staged) == ["b", "a", "tied"]
    assert staged["tied"] is staged["a"]
    assert torch.equal(staged["a"], torch.arange(4.0))
    adapter.loaded()
    assert adapter.flush() is True
    adapter.resume()
    assert fake.calls == [
        "pause keep", f"label {UNLABELLED}", "install", "flush", "label run@7", "resume", "resumed",
    ]  # fmt: skip
    adapter.pause("abort", 5)
    adapter.begin()
    with pytest.raises(LoadError, match="2 tensors"):  # what was staged before does not count
        adapter.finish(VERSION)


def test_a_draft_models_tensors_are_told_apart_by_their_prefix(fake: Fake, controls: Controls) -> None:
    main = HfCheckpoint(Manifest([TensorSpec("a", (2,), "float32", ("tied",))]), ("a", "tied"))
    both = main.with_draft(main, "draft.")
    assert both.names == ("a", "tied", "draft.a", "draft.tied")
    adapter = VllmWorkerAdapter(both, controls, draft_prefix="draft.")
    adapter.pause("abort", 5)
    adapter.load(iter([("a", torch.zeros(2)), ("draft.a", torch.ones(2))]))
    adapter.finish(VERSION)
    assert adapter.has_draft
    assert fake.calls[-1] == "install"  # once for both
    assert [(name, float(value[0])) for name, value in adapter.staged()] == [("a", 0), ("tied", 0)]
    assert [(name, float(value[0])) for name, value in adapter.staged(draft=True)] == [("a", 1), ("tied", 1)]
    adapter.loaded()
    with pytest.raises(LoadError, match="did not load"):
        adapter.resume()
    adapter.loaded(draft=True)
    adapter.resume()
    alike = VllmWorkerAdapter(main, controls, draft_prefix="")  # both take from one checkpoint
    alike.load(iter([("a", torch.zeros(2))]))
    assert alike.has_draft
    assert [name for name, _ in alike.staged(draft=True)] == [name for name, _ in alike.staged()] == ["a", "tied"]
    with pytest.raises(ConfigurationError, match="'a' must be the draft model's"):
        main.with_draft(main, "a")


def test_a_push_is_loaded_only_if_its_digests_are_right() -> None:
    specs = [TensorSpec("a", (4,), "float32"), TensorSpec("b", (2,), "float32")]
    adapter = VllmWorkerAdapter(HfCheckpoint(Manifest(specs), ("a", "b")), None)
    pushed = PushedUpdates(adapter, 0, CPU)
    sent, loads = torch.arange(6.0), []
    rendezvous = StoreRendezvous("127.0.0.1", 2, Deadline(20))
    wish = {"master_address": "127.0.0.1", "master_port": rendezvous.port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    bucket = {"names": ["a", "b"], "dtypes": ["float32"] * 2, "shapes": [[4], [2]], "load_format": "flattened_bucket"}
    with ThreadPoolExecutor(1) as other, closing(pushed):
        joining = other.submit(pushed.join, wish)
        group = init_custom_process_group("gloo", 0, 2, "weight_update_group", Deadline(20), rendezvous=rendezvous)
        joining.result(20)
        with closing(group):
            with pytest.raises(MembershipError, match="another name"):
                pushed.join(wish)
            pushed.begin()
            with pytest.raises(ManifestMismatch, match="shape of a"):
                pushed.update(bucket | {"shapes": [[5], [2]]}, lambda: loads.append(1))
            receiving = other.submit(pushed.update, bucket, lambda: loads.append(1))
            group.broadcast([sent.view(torch.uint8)], Deadline(20))
            receiving.result(20)
        right = {"a": f"{digest_box(sent[:4], (4,), [0]):016x}", "b": f"{digest_box(sent[4:], (2,), [0]):016x}"}
        with pytest.raises(VerificationError, match="1 of 2 tensors"):
            pushed.update({"digests": right | {"b": "0" * 16}}, lambda: loads.append(1))
        with pytest.raises(ConfigurationError, match="no digest for 1"):
            pushed.update({"digests": {"a": right["a"]}}, lambda: loads.append(1))
        with pytest.raises(LoadError, match="nothing was loaded"):
            pushed.finish()
        assert not loads
        pushed.update({"digests": right}, lambda: loads.append(1))
        pushed.finish()
        assert not pushed.begun
    assert len(loads) == 1
    assert torch.equal(dict(adapter.staged())["b"], sent[4:])


def test_a_push_of_other_tensors_or_from_elsewhere_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining comes before the pause."""
    pushed = PushedUpdates(VllmWorkerAdapter(HfCheckpoint(Manifest([TensorSpec("a", (4,), "float32")]), ("a",)), None), 0, CPU)
    wish = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "gloo", "timeout": 1.0}
    for names, words in ((["b"], "unknown to the engine: b"), ([], "not there to be sent: a")):
        tensors = {"names": names, "dtypes": ["float32"] * len(names), "shapes": [[4]] * len(names)}
        with pytest.raises(ManifestMismatch, match=words):
            pushed.join(wish | {"tensors": tensors})
    monkeypatch.setenv("WEIGHTSYNC_UPDATE_NETWORKS", "192.0.2.0/24")
    with pytest.raises(ConfigurationError, match="none of the networks"):
        pushed.join(wish)


@pytest.mark.parametrize("wish", [{"master_address": "127.0.0.1"}, {"master_address": "127.0.0.1", "master_port": 0}])
def test_a_group_that_is_none_is_refused(wish: dict[str, object]) -> None:
    pushed = PushedUpdates(VllmWorkerAdapter(HfCheckpoint(Manifest([TensorSpec("a", (4,), "float32")]), ("a",)), None), 0, CPU)
    with pytest.raises(ConfigurationError, match="invalid request"):
        pushed.join(wish)

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202
"""Updates of a real SGLang ``Engine``: ``python -m benchmarks.gpu_sglang tiny|moe|MODEL [--rounds N] [--ranks N] ...``.

``tiny``, or ``moe`` with a mixture of experts: a small random Qwen3 checkpoint, graphs captured, three updates by a trainer in this
process, the third with the weights of the second. Prints one line of JSON that ``test_sglang_direct.py`` looks at.
``MODEL``: a model of the GPU suite, shapes only; the time from pause to resume, and then that of SGLang's own updates with the same
tensors: ``update_weights_from_tensor``, and with more GPUs than ranks ``update_weights_from_distributed``, in buckets of 1 GiB.
SGLang has the first GPUs (``RANKS``, tensor parallel), and as many FSDP ranks of a trainer the last ones.

``--delivery streamed`` goes through SGLang's loader. With ``--format fp8-block`` SGLang serves FP8 blocks, which the trainer
quantizes. ``--set NAME=JSON`` gives SGLang another argument. SGLang and weightsync's entry point are on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

import weightsync
from benchmarks.gpu_vllm import COUNT, PROJECTIONS, PROMPTS, change, decided, served, shapes_only, share_of_gpu, tiny

BUCKET = 1 << 30
GROUP = "gpu_sglang"


def on_gpu():
    return torch.cuda.is_available()


@contextmanager
def sglang_joined(folder, server=None, **settings):
    """An SGLang, and the seconds until it answered its first request, before which it joins ``server``."""
    names = (
        {"WEIGHTSYNC_COORDINATOR": server.url, "WEIGHTSYNC_TOKEN": server.token, "WEIGHTSYNC_REPLICA": "sglang-0"} if server else {}
    )
    for name in ("WEIGHTSYNC_COORDINATOR", "WEIGHTSYNC_TOKEN", "WEIGHTSYNC_REPLICA"):
        os.environ.pop(name, None)
    os.environ.update(names)
    from sglang.srt.entrypoints.engine import Engine

    began = time.perf_counter()
    made = Engine(
        **{
            "model_path": str(folder), "skip_tokenizer_init": True, "dtype": "bfloat16", "random_seed": 0, "log_level": "info",
            "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none", "moe_runner_backend": "triton",
            "fp8_gemm_runner_backend": "triton", "disable_flashinfer_autotune": True, "disable_custom_all_reduce": True,
            "context_length": 256, "max_running_requests": 4, "max_total_tokens": 4096,
            "chunked_prefill_size": 512, "cuda_graph_bs_decode": [1, 2, 4], "cuda_graph_bs_prefill": [64, 256],
        } | settings
    )  # fmt: skip
    try:
        started = time.perf_counter() - began
        answers(made, PROMPTS[:1])
        yield made, {"sglang_start_s": round(started, 1), "first_answer_s": round(time.perf_counter() - began, 1)}
    finally:
        made.shutdown()


def answers(engine, prompts):
    """Greedy tokens of each prompt, the labels of their weights, and the tokens that were in the cache."""
    outputs = engine.generate(input_ids=prompts, sampling_params={"temperature": 0.0, "max_new_tokens": COUNT, "ignore_eos": True})
    about = [output["meta_info"] for output in outputs]
    return (
        [list(output["output_ids"]) for output in outputs],
        [each.get("weight_version", "") for each in about],
        sum(each.get("cached_tokens", 0) for each in about),
    )


def checksum(engine):
    """SGLang's own checksum of everything in its model."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    asked = CheckWeightsReqInput(action="checksum")
    success, message, _, whole = engine.loop.run_until_complete(engine.tokenizer_manager.check_weights(asked))
    assert success, message
    return whole


def check_tiny(options, settings):
    from weightsync.config import ServerSettings
    from weightsync.server.server import BackgroundServer

    with (
        tempfile.TemporaryDirectory() as made_here,
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        ExitStack() as owned,
    ):
        folder = start = Path(made_here)
        model = tiny(folder, options.model == "moe")
        if options.format:
            from benchmarks.gpu_quantized import offline

            start = offline(model, folder / "first", True)
        if on_gpu():
            settings = {"mem_fraction_static": 0.15} | settings
        engine = owned.enter_context(ExitStack())
        sglang, seen = engine.enter_context(sglang_joined(start, server, tp_size=options.ranks, **settings))
        transports = [options.transport] if options.transport else None
        quantize = "as-served" if options.format else None
        with weightsync.Trainer(model, server.url, token=server.token, transports=transports, quantize=quantize) as trainer:
            trainer.wait_for_replicas(timeout=60, refused="raise")
            prompts, wanted, gap = decided(model)
            seen |= {"before": answers(sglang, prompts)[0], "wanted": wanted, "gap": gap, "updates": []}
            for number in (1, 2, 3):
                if number < 3:
                    change(model, number)
                    prompts, wanted, gap = decided(model)
                answers(sglang, prompts)
                _, _, warm = answers(sglang, prompts)  # the prompts are now cached, under the version before
                (replica,) = trainer.publish(number, timeout=60).replicas
                found, labels, cached = answers(sglang, prompts)
                seen["updates"].append({
                    "answers": found, "wanted": wanted, "gap": gap, "labels": sorted(set(labels)), "published": replica.version,
                    "delivery": replica.delivery, "why": replica.delivery_reason, "transports": list(replica.transports),
                    "verified": replica.verified, "warm": warm, "cached": cached,
                    "paused_ms": round(1000 * replica.paused_seconds, 2),
                })  # fmt: skip
        directly = checksum(sglang)
        if options.format:  # what another SGLang makes of the same weights, quantized offline
            engine.close()
            offline_too = offline(model, folder / "second", True)
            sglang, _ = engine.enter_context(sglang_joined(offline_too, tp_size=options.ranks, **settings))
            seen["as_quantized_offline"] = answers(sglang, prompts)[0] == found
        else:
            model.save_pretrained(folder / "second")
            success, message, *_ = sglang.update_weights_from_disk(str(folder / "second"))
            assert success, message
        seen["bits_of_own_loading"] = checksum(sglang) == directly
        print("\nRESULT " + json.dumps(seen), flush=True)


def buckets(weights):
    held, size = [], 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > BUCKET:
            yield held, False
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    yield held, True


def by_tensor(engine, weights, ranks):
    """SGLang's ``update_weights_from_tensor``, in flattened buckets, which it reads by CUDA IPC."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    for bucket, last in buckets(weights):
        flat = FlattenedTensorBucket(named_tensors=bucket)
        content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        payloads = [MultiprocessingSerializer.serialize(content) for _ in range(ranks)]
        success, message, *_ = engine.update_weights_from_tensor(payloads, load_format="flattened_bucket", flush_cache=last)
        assert success, message


def by_group(engine, weights, group):
    """SGLang's ``update_weights_from_distributed``, in flattened buckets, which this process broadcasts."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    def send(bucket):
        with torch.cuda.device(bucket[0][1].device):
            flat = FlattenedTensorBucket(named_tensors=bucket).get_flattened_tensor()
            torch.distributed.broadcast(flat, src=0, group=group)
            torch.cuda.synchronize()

    for bucket, last in buckets(weights):
        sender = threading.Thread(target=send, args=(bucket,))
        sender.start()
        names, tensors = zip(*bucket, strict=True)
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        success, message, *_ = engine.update_weights_from_distributed(
            list(names), dtypes, [list(tensor.shape) for tensor in tensors], GROUP,
            flush_cache=last, load_format="flattened_bucket",
        )  # fmt: skip
        sender.join()
        assert success, message


def joined_group(engine, ranks, device):
    from sglang.srt.utils import init_custom_process_group

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, made = free.getsockname()[1], []

    def join():
        torch.cuda.set_device(device)
        where = f"tcp://127.0.0.1:{port}"
        made.append(init_custom_process_group(backend="nccl", init_method=where, world_size=ranks + 1, rank=0, group_name=GROUP))

    ours = threading.Thread(target=join)
    ours.start()
    success, message, *_ = engine.init_weights_update_group("127.0.0.1", port, 1, ranks + 1, GROUP, "nccl")
    ours.join()
    assert success, message
    return made[0]


def timed(engine, update, *arguments):
    """Seconds of one update of SGLang's own, from its pause to its continuation, three times."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    manager, took = engine.tokenizer_manager, []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.loop.run_until_complete(manager.pause_generation(PauseGenerationReqInput(mode="retract")))
        engine.begin_weight_update()
        update(engine, *arguments)
        engine.end_weight_update()
        engine.loop.run_until_complete(manager.continue_generation(ContinueGenerationReqInput()))
        took.append(round(time.perf_counter() - began, 3))
        answers(engine, PROMPTS[:1])  # it goes on
    return took


def own_updates(engine, manifest, ranks):
    """What SGLang's own updates of the same tensors take, in seconds."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    weights = [(spec.name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)) for spec in manifest]
    print("\nOWN from_tensor", timed(engine, by_tensor, weights, ranks), "s", flush=True)
    if torch.cuda.device_count() > ranks:
        print("\nOWN from_distributed", timed(engine, by_group, weights, joined_group(engine, ranks, device)), "s", flush=True)


def measure(options, settings):
    from weightsync.config import ServerSettings
    from weightsync.server.server import BackgroundServer
    from weightsync_bench.gpu_job import manifest_for
    from weightsync_bench.peer import Peer, together

    count, ranks = torch.cuda.device_count(), options.ranks
    on, to = list(range(count - ranks, count)), list(range(ranks))
    job = {"name": "sglang", "model": options.model, "delivery": options.delivery, "on": on, "to": to}
    if options.transport:
        job["transport"] = options.transport
    if options.format:
        job["quantize"] = {PROJECTIONS: options.format}
    manifest = served(manifest_for(options.model), options.format)
    share = {"load_format": "dummy", "mem_fraction_static": round(share_of_gpu(manifest, ranks) + 0.05, 3)}
    with tempfile.TemporaryDirectory() as folder, BackgroundServer(ServerSettings.load({}, port=0, heartbeat=60.0)) as server:
        shapes_only(folder, manifest, bool(options.format))
        with sglang_joined(folder, server, tp_size=ranks, **share | settings) as (engine, seen), ExitStack() as owned:
            before = answers(engine, PROMPTS[:2])[0]
            trainers = [
                owned.enter_context(Peer("weightsync_bench.gpu_rank", {"role": "trainer", "rank": rank, "job": job}))
                for rank in range(ranks)
            ]
            print([each.hear(120) for each in trainers])
            together(trainers, do="join", url=server.url, token=server.token)
            paused = []
            for version in range(options.rounds):
                together(trainers, do="change", version=version)
                (replica,) = together(trainers, do="publish", version=version)[0]["result"]["replicas"]
                paused.append(round(1000 * replica["paused_seconds"], 2))
                about = {
                    name: replica[name] for name in ("version", "transports", "delivery", "delivery_reason", "verified", "nbytes")
                }
                print(json.dumps({
                    **about, "paused_ms": paused[-1],
                    "phases_ms": {name: round(1000 * value, 2) for name, value in replica["phases"].items()},
                    "parts_ms": {name: round(1000 * value, 2) for name, value in replica["parts"].items()},
                }), flush=True)  # fmt: skip
            later = paused[1:] or paused
            print("\nRESULT " + json.dumps({
                "model": options.model, "ranks": ranks, "gpus": count, **seen, **about, "paused_ms": paused,
                "median_ms": statistics.median(later), "least_ms": min(later), "most_ms": max(later),
                "generates": answers(engine, PROMPTS[:2])[0] != before,
            }), flush=True)  # fmt: skip
            owned.close()  # SGLang's own updates take memory too
            if options.own and not options.format:
                own_updates(engine, manifest, ranks)


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--transport")
    parser.add_argument("--format")
    parser.add_argument("--delivery", default="direct")
    parser.add_argument("--own", action="store_true", help="time SGLang's own updates, too")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON")
    options = parser.parse_args(argv)
    if options.format not in (None, "fp8-block"):
        parser.error("--format is fp8-block")
    os.environ["WEIGHTSYNC_DELIVERY"] = options.delivery
    pairs = [text.partition("=") for text in options.set]
    return options, {name: json.loads(value) for name, _, value in pairs}


def main():
    options, settings = arguments()
    if options.model in ("tiny", "moe"):
        check_tiny(options, settings)
    else:
        measure(options, settings)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)

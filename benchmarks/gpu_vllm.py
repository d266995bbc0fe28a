# mypy: ignore-errors
# ruff: noqa: ANN001, ANN003, ANN201
"""Direct delivery into a real vLLM: ``python -m benchmarks.gpu_vllm tiny|moe|MODEL [--rounds N] [--ranks N] ...``.

``tiny``: a small random Qwen3 checkpoint, graphs captured, updates; prints one line of JSON that ``test_vllm_direct.py`` looks at.
``moe``: the same with a mixture of experts, which Transformers packs, and a trainer that holds float32. With ``--balance now`` or
``background`` vLLM's ranks share the experts out and move them while they serve (EPLB); the weights of every slot are looked at.
``MODEL``: a model of the GPU suite, shapes only; the time from pause to resume. vLLM has the first GPUs (``RANKS``, tensor
parallel), and as many FSDP ranks of a trainer the last ones. With ``--format fp8-block`` or ``fp8-block-e8m0`` it quantizes
projections; with ``--changed 0.01`` it publishes deltas of that share of changed words.
With ``VLLM_ALLOW_INSECURE_SERIALIZATION=1`` vLLM's own reload of the same shapes, from tensors on its GPU, is timed after them.
vLLM and weightsync's entry point are on the path.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
if sys.argv[1:2] in (["tiny"], ["moe"]):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the model's own memory can be looked at

import torch

import weightsync

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "hidden_act": "silu", "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DENSE = {
    **{name: value for name, value in MOE.items() if "expert" not in name and name not in ("mlp_only_layers", "norm_topk_prob")},
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_key_value_heads": 8,
}  # fmt: skip
PROMPTS = [[(11 * row + 7 * column * (row + 2)) % 509 + 3 for column in range(40)] for row in range(48)]
COUNT = 12
CHOSEN = 4
PROJECTIONS = "*_proj.weight"


def tiny(folder, moe=False):
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(7)
    sizes = dict(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    if moe:
        experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=1, mlp_only_layers=[])
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)).to(torch.bfloat16)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model.to(f"cuda:{torch.cuda.device_count() - 1}") if torch.cuda.is_available() else model


def write_shapes(folder, tensors):
    """A checkpoint of which only the headers are there, and holes after them: name to (dtype, shape, bytes of an element)."""
    header, end = {}, 0
    for name, (kind, shape, itemsize) in tensors.items():
        begin, end = end, end + math.prod(shape) * itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (Path(folder) / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def shapes_only(folder, manifest, quantized=False):
    """The checkpoint of the manifest, shapes only, and its configuration."""
    kinds = {"bfloat16": ("BF16", 2), "float32": ("F32", 4), "float8_e4m3fn": ("F8_E4M3", 1), "float8_e8m0fnu": ("F8_E8M0", 1)}
    write_shapes(folder, {spec.name: (kinds[spec.dtype][0], spec.shape, kinds[spec.dtype][1]) for spec in manifest})
    layers = {spec.name.split(".")[2] for spec in manifest if spec.name.startswith("model.layers.")}
    kind = MOE if any(".experts." in spec.name for spec in manifest) else DENSE
    config = {**kind, "num_hidden_layers": len(layers)}
    if quantized:
        routers = [spec.name.removesuffix(".weight") for spec in manifest if spec.name.endswith("mlp.gate.weight")]
        config["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", *routers],
        }  # fmt: skip
    (Path(folder) / "config.json").write_text(json.dumps(config))


def served(manifest, format_name):
    """The manifest of what the trainer publishes."""
    from weightsync.model import Manifest
    from weightsync.tensors.quantization import formats_by_pattern

    formats = formats_by_pattern(manifest, {PROJECTIONS: format_name}) if format_name else {}
    return Manifest(made for spec in manifest for made in (formats[spec.name].specs(spec) if spec.name in formats else [spec]))


def own_reload(worker, tensors):
    """Seconds that vLLM's own reload takes, from tensors on its GPU; runs in its worker."""
    weights = [(name, torch.zeros(shape, dtype=getattr(torch, dtype), device=worker.device)) for name, shape, dtype in tensors]
    torch.cuda.synchronize()
    began = time.perf_counter()
    worker.reload_weights(weights_iterator=iter(weights))
    torch.cuda.synchronize()
    return time.perf_counter() - began


def change(model, seed):
    generator = torch.Generator(device=model.device).manual_seed(seed)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "norm" not in name:
                one.copy_(torch.randn(one.shape, generator=generator, device=model.device) * 0.2)


def share_of_gpu(manifest, ranks):
    """The share of a GPU that vLLM needs for its weights, its steps and a few short requests: a trainer may be on the same GPU."""
    need = 1.02 * manifest.nbytes / ranks + 2.5e9
    return round(need / torch.cuda.get_device_properties(0).total_memory, 3)


@contextmanager
def vllm_joined(folder, share, server, ranks=1, transport=None, bucket_bytes=None, **options):
    """A vLLM that has joined, with its ``share`` of the GPU's memory if the checkpoint has only shapes."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    from weightsync.engines.vllm import attach

    began = time.perf_counter()
    llm = LLM(
        model=str(folder), load_format="dummy" if share else "auto", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
        gpu_memory_utilization=share or 0.1, max_model_len=256, max_num_seqs=4, enforce_eager=False,
        tensor_parallel_size=ranks,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},
        weight_transfer_config=WeightTransferConfig(backend="weightsync"), **options,
    )  # fmt: skip
    started = time.perf_counter() - began
    began = time.perf_counter()
    transports = [transport] if transport else None
    with attach(llm, "vllm-0", server.url, token=server.token, transports=transports, bucket_bytes=bucket_bytes) as attached:
        seen = {"vllm_start_s": round(started, 1), "join_s": round(time.perf_counter() - began, 2)}
        print("JOINED " + json.dumps(seen), flush=True)
        yield llm, attached, seen
    if share:
        llm.llm_engine.engine_core.shutdown()  # a process of its own, which would outlive this one


def tokens(llm, attached, prompts=PROMPTS[:CHOSEN]):
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    with attached.in_use(60) as version:
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    return version, [list(one.outputs[0].token_ids) for one in found], sum(one.num_cached_tokens or 0 for one in found)


def decided(model):
    """The prompts whose greedy answers are the least close, with these answers: sums in another order give the same ones."""
    ids = torch.tensor(PROMPTS, device=model.device)
    gaps = torch.full((len(PROMPTS),), torch.inf, device=model.device)
    for _ in range(COUNT):
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[:, -1].float()
        best = logits.topk(2)
        gaps = torch.minimum(gaps, (best.values[:, 0] - best.values[:, 1]) / logits.std(-1))
        ids = torch.cat([ids, best.indices[:, :1]], 1)
    chosen = gaps.topk(CHOSEN)
    found = ids[:, -COUNT:].tolist()
    return [PROMPTS[row] for row in chosen.indices.tolist()], [found[row] for row in chosen.indices.tolist()], float(gaps.max())


def installed(model):
    """Where every parameter is, and a sum over its bits."""
    return {n: (p.data_ptr(), int(p.detach().flatten().view(torch.int16).long().sum())) for n, p in model.named_parameters()}


def balanced(how):
    """Options of a vLLM whose ranks move their experts every few steps, all steps ``now`` or in the ``background``."""
    if how is None:
        return {}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # so that the workers can be asked for their slots
    balancing = {"window_size": 4, "step_interval": 5, "num_redundant_experts": 2, "use_async": how == "background"}
    return {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": balancing}


def weighted(experts):
    """A number for the bits of each expert, (E, ...) to E."""
    bits = experts.detach().flatten(1).view(torch.int16).long()
    return (bits * (torch.arange(bits.shape[1], device=bits.device) % 251 + 1)).sum(1).tolist()


def slots(worker):
    """Rows of layer, slot, its expert, and the bits of its two weights; runs in vLLM's worker, between steps."""
    torch.cuda.synchronize()
    runner = worker.model_runner
    [state] = runner.eplb_state.model_states.values()
    modules = [module for module in runner.get_model().modules() if type(module).__name__ == "RoutedExperts"]
    rows = []
    for layer, (module, experts) in enumerate(zip(modules, state.physical_to_logical_map.tolist(), strict=True)):
        begin = worker.rank * len(module.w13_weight)
        for slot, bits in enumerate(zip(weighted(module.w13_weight), weighted(module.w2_weight), strict=True), begin):
            rows.append([layer, slot, experts[slot], *bits])
    return rows


def wrong_slots(llm, model):
    """Which expert is in which slot, and the slots that do not hold the weights of their expert in ``model``."""
    layers = [layer.mlp.experts for layer in model.model.layers]
    wanted = [list(zip(weighted(layer.gate_up_proj), weighted(layer.down_proj), strict=True)) for layer in layers]
    rows = [row for rank in llm.collective_rpc(slots) for row in rank]
    return [row[2] for row in rows], [row[:3] for row in rows if tuple(row[3:]) != wanted[row[0]][row[2]]]


def check_tiny(ranks, transport, moe=False, balance=None):
    from weightsync.config import ServerSettings
    from weightsync.server.server import BackgroundServer

    with tempfile.TemporaryDirectory() as folder, BackgroundServer(ServerSettings.load({}, port=0)) as server:
        reference = tiny(folder, moe)
        published, options = reference, {}
        if moe:
            published, options = copy.deepcopy(reference).float(), {"dtype": torch.bfloat16}
        with vllm_joined(folder, 0.0, server, ranks, transport, **balanced(balance)) as (llm, attached, seen):
            model, calls = torch.nn.Module(), []
            if ranks == 1:  # else it is in other processes
                model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
                own = model.load_weights
                model.load_weights = lambda weights: calls.append("load_weights") or own(weights)
            transports = [transport] if transport else None
            with weightsync.Trainer(published, server.url, token=server.token, transports=transports, **options) as trainer:
                places = {name: where for name, (where, _) in installed(model).items()}
                prompts, wanted, gap = decided(reference)
                seen |= {"before": tokens(llm, attached, prompts)[1], "wanted": wanted, "gap": gap, "updates": []}
                for number in (1, 2, 3):
                    if number < 3:
                        change(reference, number)
                        prompts, wanted, gap = decided(reference)
                    tokens(llm, attached, prompts)
                    _, _, warm = tokens(llm, attached, prompts)  # the prompts are now cached, under the version before
                    published.load_state_dict(reference.state_dict())
                    (replica,) = trainer.publish(number, timeout=60).replicas
                    version, answers, cached = tokens(llm, attached, prompts)
                    seen["updates"].append({
                        "answers": answers, "wanted": wanted, "gap": gap, "version": version, "published": replica.version,
                        "delivery": replica.delivery, "transports": list(replica.transports), "verified": replica.verified,
                        "warm": warm, "cached": cached, "paused_ms": round(1000 * replica.paused_seconds, 2),
                        "in_place": places == {name: where for name, (where, _) in installed(model).items()},
                    })  # fmt: skip
                    if balance:
                        seen["updates"][-1] |= dict(zip(("experts", "wrong"), wrong_slots(llm, reference), strict=True))
                seen |= {"loader_calls": calls}
                if ranks > 1:
                    print("RESULT " + json.dumps(seen), flush=True)
                    return
                direct, model.load_weights = installed(model), own
                reference.save_pretrained(folder)
                llm.collective_rpc("reload_weights")  # vLLM's own way, from the file
                seen |= {"bits_of_own_loading": direct == installed(model)}
    print("RESULT " + json.dumps(seen), flush=True)


def measure(name, rounds, ranks, transport, format_name, changed):
    from weightsync.config import ServerSettings
    from weightsync.server.server import BackgroundServer
    from weightsync_bench.gpu_job import manifest_for
    from weightsync_bench.peer import Peer, together

    count = torch.cuda.device_count()
    on, to = list(range(count - ranks, count)), list(range(ranks))
    job = {"name": "vllm", "model": name, "delivery": "direct", "on": on, "to": to, "changed": changed}
    if transport:
        job["transport"] = transport
    if format_name:
        job["quantize"] = {PROJECTIONS: format_name}
    manifest = served(manifest_for(name), format_name)
    with tempfile.TemporaryDirectory() as folder, BackgroundServer(ServerSettings.load({}, port=0, heartbeat=60.0)) as server:
        shapes_only(folder, manifest, bool(format_name))
        share, most = share_of_gpu(manifest, ranks), None if changed == 1 else 4 << 30  # a trainer on this GPU leaves little room
        with vllm_joined(folder, share, server, ranks, transport, most) as (llm, attached, _), ExitStack() as owned:
            trainers = [
                owned.enter_context(Peer("weightsync_bench.gpu_rank", {"role": "trainer", "rank": rank, "job": job}))
                for rank in range(ranks)
            ]

            before = tokens(llm, attached)[1]
            print([one.hear(120) for one in trainers])
            together(trainers, do="join", url=server.url, token=server.token)
            for version in range(rounds):
                together(trainers, do="change", version=version)
                told = together(trainers, do="publish", version=version)[0]
                (replica,) = told["result"]["replicas"]
                print(json.dumps({
                    **{name: replica[name] for name in ("version", "transports", "delivery", "verified")},
                    "paused_ms": round(1000 * replica["paused_seconds"], 2), "bytes": replica["nbytes"], "base": replica["base"],
                    "publish_ms": round(1000 * (told["ended"] - told["begun"]), 2),
                    "phases_ms": {name: round(1000 * value, 2) for name, value in replica["phases"].items()},
                    "parts_ms": {name: round(1000 * value, 2) for name, value in replica["parts"].items()},
                }), flush=True)  # fmt: skip
            print("generates with the graphs captured before:", tokens(llm, attached)[1] != before, flush=True)
            owned.close()  # vLLM's reload needs the weights a second time on its GPU
            if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == "1":
                shapes = [(spec.name, spec.shape, spec.dtype) for spec in manifest]
                print("vLLM's own reload, s:", [llm.collective_rpc(own_reload, args=(shapes,)) for _ in range(3)], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--transport")
    parser.add_argument("--format")
    parser.add_argument("--changed", type=float, default=1.0)
    parser.add_argument("--balance", choices=("now", "background"))
    options = parser.parse_args()
    if options.model in ("tiny", "moe"):
        check_tiny(options.ranks, options.transport, options.model == "moe", options.balance)
    else:
        measure(options.model, options.rounds, options.ranks, options.transport, options.format, options.changed)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)

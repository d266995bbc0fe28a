"""Adapters of experts lie in memory as vLLM stacks them: what its own manager makes of the same matrices is the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.model.lora import AdapterSpec, LoraConfig

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

EXPERTS, RANK, WIDTH, INNER = 3, 4, 24, 16
PARTS = ("gate_proj", "down_proj", "up_proj")
WHOLE = "model.layers.0.mlp.experts"
DENSE = "model.layers.0.self_attn.qkv_proj"


def together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in one piece of memory, where those of experts lie evenly, as they are received."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors.values()))
    parts = torch.split(flat, [tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensor.shape).copy_(tensor) for (name, tensor), part in zip(tensors.items(), parts, strict=True)}


def matrices(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"{WHOLE}.{expert}.{part}": (WIDTH, INNER) if part == "down_proj" else (INNER, WIDTH)
              for expert in range(EXPERTS) for part in PARTS}  # fmt: skip
    shapes |= {f"{DENSE.rpartition('.')[0]}.{part}": (WIDTH, WIDTH) for part in ("q_proj", "k_proj", "v_proj")}
    return {
        f"base_model.model.{name}.lora_{side}.weight": torch.randn(shape, generator=generator)
        for name, (rows, columns) in shapes.items()
        for side, shape in (("A", (RANK, columns)), ("B", (rows, RANK)))
    }


def manager(*, parallel: bool) -> Any:
    """vLLM's manager of a model with one layer, of which it has made nothing yet."""
    from vllm.lora.layers import FusedMoEWithLoRA
    from vllm.lora.model_manager import LoRAModelManager

    class Layer(torch.nn.Module):
        use_ep = parallel

    Layer.__name__ = FusedMoEWithLoRA.__name__
    made = LoRAModelManager.__new__(LoRAModelManager)
    made.model = SimpleNamespace()
    made.lora_config = SimpleNamespace(max_cpu_loras=4, max_lora_rank=8, lora_dtype=torch.bfloat16)
    made.is_pooling_model = made._is_non_gated_moe = made._enable_moe_shared_loras = False
    made._enable_mixed_moe_lora_format = False
    made.packed_modules = {
        WHOLE: [f"{WHOLE}.{expert}.{part}" for expert in range(EXPERTS) for part in PARTS],
        DENSE: [f"{DENSE.rpartition('.')[0]}.{part}" for part in ("q_proj", "k_proj", "v_proj")],
    }
    dense = SimpleNamespace(base_layer=SimpleNamespace(output_sizes=[WIDTH] * 3, input_size=WIDTH))
    made.modules = {WHOLE: Layer(), DENSE: dense}
    return made


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("scalings", [{}, {f"{WHOLE}.1.up_proj": 0.5}])
def test_experts_are_stacked_as_vllm_stacks_them(
    parallel: bool, scalings: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.lora.lora_model import LoRAModel

    from weightsync.engines.vllm import loras
    from weightsync.tensors.shards import manifest_of

    config = SimpleNamespace(validate_legal=lambda config: None)
    own = loras._helper
    monkeypatch.setattr(loras, "_helper", lambda spec: _legal(own(spec), config))
    spec = AdapterSpec("alice/math", LoraConfig(RANK, 2.0 * RANK, scalings=scalings))
    for seed in range(2):  # the second takes the arrangement of the first
        tensors = together(matrices(seed)) if seed else matrices(seed)
        ours, theirs = manager(parallel=parallel), manager(parallel=parallel)
        worker = loras.WorkerLoras(ours, 64, None, 1)
        worker.check(spec, manifest_of(tensors))
        assert bool(worker._arranged.experts) != parallel, "the ranks of expert parallelism hold a part: vLLM cuts it"
        worker.stage("alice/math@1", spec, tensors)
        stack = [tensors[given.name] for given in next(iter(worker._arranged.experts.values()))[0]] if not parallel else []
        assert bool(stack and loras._one_tensor(stack).data_ptr() == stack[0].data_ptr()) == bool(stack and seed)
        given = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        for name, tensor in given.items():
            if ".lora_B." in name:
                tensor.mul_(spec.config.scaling(name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")))
        expected = LoRAModel.from_lora_tensors(1, given, own(spec), device="cpu", dtype=torch.bfloat16)
        theirs._create_merged_loras_inplace(expected)
        taken = worker.take("alice/math@1", 1 << 24)
        assert taken.loras.keys() == expected.loras.keys()
        for name, module in expected.loras.items():
            mine = taken.loras[name]
            assert (mine.rank, mine.scaling, type(mine)) == (module.rank, module.scaling, type(module))
            for one, other in ((mine.lora_a, module.lora_a), (mine.lora_b, module.lora_b)):
                assert len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for tensor in tensors.values():
            tensor.fill_(torch.nan)
        assert all(bool(a.isfinite().all()) for a in taken.loras[WHOLE].lora_a), "they were lent"


def _legal(helper: Any, config: Any) -> Any:
    helper.validate_legal = config.validate_legal
    return helper


def parted(ranks: int, rank: int) -> Any:
    """vLLM's manager, with its own layer of experts, as ``rank`` of ``ranks`` has it."""
    from vllm.lora.layers import FusedMoEWithLoRA

    layer = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(layer)
    parallel = SimpleNamespace(use_ep=False, ep_rank=0)
    layer.moe_config = SimpleNamespace(
        num_local_experts=EXPERTS, num_experts=EXPERTS, hidden_dim=WIDTH, intermediate_size_per_partition=INNER // ranks,
        moe_parallel_config=parallel,
    )  # fmt: skip
    vars(layer).update(tp_size=ranks, tp_rank=rank, device="cpu", _w13_slices=2, base_layer=None)
    made = manager(parallel=False)
    vars(made.lora_config).update(max_loras=2, fully_sharded_loras=False, enable_moe_shared_loras=False)
    layer.create_lora_weights(2, made.lora_config)
    made.modules, made.packed_modules = {WHOLE: layer}, {WHOLE: made.packed_modules[WHOLE]}
    made._active_adapters, made._registered_adapters, made.lora_index_to_id = {}, {}, [None, None]
    return made


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("scalings", [{}, {f"{WHOLE}.1.up_proj": 0.3}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_read_back_from_vllms_layer(
    ranks: int, rank: int, scalings: dict[str, float], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightsync.engines.vllm import loras
    from weightsync.errors import LoadError
    from weightsync.tensors.shards import manifest_of

    config, own = SimpleNamespace(validate_legal=lambda config: None), loras._helper
    monkeypatch.setattr(loras, "_helper", lambda spec: _legal(own(spec), config))
    spec = AdapterSpec("alice/math", LoraConfig(RANK, 1.5 * RANK, scalings=scalings))
    vllm = parted(ranks, rank)
    worker, layer = loras.WorkerLoras(vllm, 64, None, ranks), vllm.modules[WHOLE]
    for number in (1, 2):
        tensors = {name: tensor.to(dtype) for name, tensor in together(matrices(number)).items() if WHOLE in name}
        worker.check(spec, manifest_of(tensors))
        memory = worker.memory()
        assert (memory is None) == (dtype != vllm.lora_config.lora_dtype), "what is converted is copied in any case"
        for name, place in (memory or {}).items():
            place.copy_(tensors[name])
        assert worker.stage(f"alice/math@{number}", spec, memory or tensors) == "", "it can be read back"
        kept = worker.take(f"alice/math@{number}", number).loras[WHOLE]
        if memory is not None:
            first = [memory[f"base_model.model.{WHOLE}.0.{part}.lora_B.weight"] for part in ("gate_proj", "down_proj", "up_proj")]
            assert [b.data_ptr() for b in kept.lora_b] == [b.data_ptr() for b in first], "vLLM keeps it where it was received"
        assert not any(bool(stack[number - 1].any()) for stack in layer.w13_lora_b_stacked), "nothing was written on the way"
        vllm._registered_adapters[number] = worker.take(f"alice/math@{number}", number)
        if number == 1:
            expected: Any = worker._held["alice/math@1"].unread
            kept.lora_b[1][2].mul_(1.0)
            with pytest.raises(LoadError, match="vLLM wrote to the matrices"):
                vllm.activate_adapter(number)
            expected.__self__._written = [stack._version for stack in expected.__self__._stacks]
            vllm.deactivate_adapter(number)
            worker.take("alice/math@1", number)
            vllm.activate_adapter(number)
            assert worker._held["alice/math@1"].unread is None, "it was read back"
            continue

        def spoiling(*arguments: Any) -> None:
            type(layer).set_lora(layer, *arguments)
            layer.w2_lora_a_stacked[0][1, 2, 1, 3] += 1

        layer.set_lora = spoiling
        with pytest.raises(LoadError, match=r"other bytes than were published of .*\.down_proj\.lora_A"):
            vllm.activate_adapter(number)

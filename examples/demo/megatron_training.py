"""The trainer with Megatron-core: the demo's model cut by tensor parallelism, trained on this CPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig, PreTrainedModel

from examples.demo.models import CONTEXT
from examples.demo.oracle import write_checkpoint
from examples.demo.records import Order
from examples.demo.settings import RATE, OptimizerName
from examples.demo.training import BETAS, batches
from weightsync.integrations.megatron import hf_state

__all__ = ["MegatronTraining"]


class _Nothing:
    """A CUDA stream or event, of which Megatron makes some that this model does not use."""

    def __init__(self, *_: object, **__: object) -> None:
        pass


class MegatronTraining:
    """One tensor-parallel rank's part of the training; every rank calls :meth:`step` and :meth:`save` equally often.

    Weights are float32, in which a CPU multiplies several times faster, and are published in bfloat16.
    """

    dtype = torch.bfloat16

    def __init__(
        self,
        model: PreTrainedModel,
        seed: int,
        epoch: int,
        *,
        rate: float = RATE,
        optimizer: OptimizerName = "adamw",
        masters: bool = True,
    ) -> None:
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
        torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[misc,assignment]
        CudaRNGStatesTracker.fork = lambda self, *_, **__: nullcontext()
        parallel_state.initialize_model_parallel(dist.get_world_size())
        torch.manual_seed(seed)
        self._hf = hf = model.config
        self._model = _build(hf)
        self.state = hf_state(self._model, config=hf)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)
        self._batches = batches(seed, 0, epoch)  # all ranks hold parts of one model

    def step(self) -> float:
        """One batch, one optimizer step. Returns the loss before the step."""
        batch = next(self._batches)
        tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        length = tokens.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        loss = self._model(tokens, torch.arange(length).expand_as(tokens), mask, labels=labels).mean()
        loss.backward()
        self._clip(1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def _clip(self, most: float) -> None:
        """Scale the gradients to a norm of at most ``most``, over all ranks."""
        squares = torch.zeros(2)  # of what is cut, of what every rank has
        gradients = []
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                squares[0 if getattr(parameter, "tensor_model_parallel", False) else 1] += parameter.grad.square().sum()
        dist.all_reduce(squares[:1])
        scale = (most / squares.sum().sqrt()).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)

    def save(self, directory: Path, version: Order) -> None:
        """Gather the model, convert it to Hugging Face names in the plainest way, and save it on rank 0."""
        whole = {name: _gathered(parameter) for name, parameter in self._model.named_parameters()}
        if dist.get_rank() == 0:
            state = {name: value.to(self.dtype) for name, value in _converted(whole, self._hf).items()}
            write_checkpoint(state, directory, version)


def _build(hf: PretrainedConfig) -> GPTModel:
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads, ffn_hidden_size=hf.intermediate_size, layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, add_qkv_bias=hf.model_type == "qwen2", attention_dropout=0.0, hidden_dropout=0.0,
        use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        tensor_model_parallel_size=dist.get_world_size(),
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=hf.vocab_size, max_sequence_length=CONTEXT,
        share_embeddings_and_output_weights=hf.tie_word_embeddings, position_embedding_type="rope",
    )  # fmt: skip


def _gathered(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The parts of all ranks, or the one that all have."""
    data = parameter.detach()
    if not getattr(parameter, "tensor_model_parallel", False):
        return [data]
    parts = [torch.empty_like(data) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, data.contiguous())
    return parts


def _converted(whole: dict[str, list[torch.Tensor]], hf: PretrainedConfig) -> dict[str, torch.Tensor]:
    """The checkpoint that owes nothing to weightsync, from the parts of each parameter."""
    plain = {
        "embedding.word_embeddings.weight": ("model.embed_tokens.weight", 0), "output_layer.weight": ("lm_head.weight", 0),
        "decoder.final_layernorm.weight": ("model.norm.weight", 0), "input_layernorm.weight": ("input_layernorm.weight", 0),
        "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", 0),
        "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1), "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
    }  # fmt: skip
    state = {}
    for name, parts in whole.items():
        before, _, key = name.rpartition("decoder.layers.")
        number, _, inner = key.partition(".")
        prefix, inner = (f"model.layers.{number}.", inner) if name.startswith("decoder.layers.") else ("", before + key)
        kind = inner.rpartition(".")[2]
        if inner in plain:
            there, dim = plain[inner]
            state[prefix + there] = torch.cat(parts, dim)
        elif "linear_qkv" in inner:
            stacked = torch.cat(parts)
            rows = hf.num_attention_heads // hf.num_key_value_heads + 2
            groups = stacked.view(hf.num_key_value_heads, rows, -1, *stacked.shape[1:])
            for letter, part in (("q", groups[:, :-2]), ("k", groups[:, -2]), ("v", groups[:, -1])):
                state[f"{prefix}self_attn.{letter}_proj.{kind}"] = part.reshape(-1, *stacked.shape[1:])
        else:
            gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
            state[f"{prefix}mlp.gate_proj.{kind}"], state[f"{prefix}mlp.up_proj.{kind}"] = torch.cat(gates), torch.cat(ups)
    return state

"""In which dtype a vLLM may serve shards that are published in the dtypes of a checkpoint's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from weightsync.errors import ConfigurationError
from weightsync.integrations.stream_ranks import served_checkpoint


@pytest.mark.parametrize(
    ("files", "served", "exact"),
    [
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, True),
        (torch.float16, None, True),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
    ],
    ids=str,
)
def test_shards_are_rounded_once(tmp_path: Path, files: torch.dtype, served: torch.dtype | None, exact: bool) -> None:
    config = LlamaConfig(num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    save_file({"model.norm.weight": torch.ones(4, dtype=files)}, tmp_path / "model.safetensors", {"format": "pt"})
    if exact:
        assert [spec.name for spec in served_checkpoint(str(tmp_path), None, config, served)] == ["model.norm.weight"]
    else:
        with pytest.raises(ConfigurationError, match=f"does not hold all numbers of vLLM's \\({served}"):
            served_checkpoint(str(tmp_path), None, config, served)

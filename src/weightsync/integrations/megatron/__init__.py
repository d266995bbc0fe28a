"""Megatron-core models as sources of weights, under Hugging Face names, without a gather."""

from weightsync.integrations.megatron.families import FAMILIES, Family
from weightsync.integrations.megatron.state import MegatronState, hf_state

__all__ = ["FAMILIES", "Family", "MegatronState", "hf_state"]

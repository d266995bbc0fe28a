"""Engines as adapters: a PyTorch module, vLLM. Nothing in the library imports them but their users."""

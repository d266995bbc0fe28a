"""Engine adapters: PyTorch modules and vLLM. The rest of the library does not import them."""

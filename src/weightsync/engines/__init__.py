"""Engine adapters: PyTorch modules, vLLM and SGLang. The rest of the library does not import them."""

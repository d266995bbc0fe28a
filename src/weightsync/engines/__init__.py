"""Engine adapters: PyTorch modules, vLLM and SGLang. Of the rest only ``integrations`` imports them."""

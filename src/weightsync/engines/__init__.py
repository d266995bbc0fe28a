"""Engine adapters: PyTorch modules, vLLM and SGLang. Of the rest only ``ray`` and ``integrations`` import them."""

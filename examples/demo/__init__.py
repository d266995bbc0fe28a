"""``make demo``: a language model trained under FSDP2, served by replicas under constant traffic, checked token by token.

Nothing in the library imports this package. Start with :mod:`examples.demo.main`.
"""

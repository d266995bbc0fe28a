"""Conversion of tensors to bytes: shards, memory layouts, copies, digests."""

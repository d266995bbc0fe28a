"""Where tensors become bytes: shards, layouts of memory, copies, digests."""

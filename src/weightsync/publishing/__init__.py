"""How a rank publishes its shards: a copy in host memory, or GPU memory in place, by every transport that reads it."""

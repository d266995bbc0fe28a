"""One publisher to many readers at once, by a process group: gloo for host memory, NCCL for CUDA memory."""

"""Memory that readers pull by one-sided reads, through NVIDIA's NIXL."""

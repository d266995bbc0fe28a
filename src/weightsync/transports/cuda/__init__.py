"""CUDA memory that other processes of this host map."""

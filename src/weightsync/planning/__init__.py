"""Transfer planning and coverage checks: pure arithmetic over layouts, in NumPy. Uses no tensors and no I/O."""

"""Host memory that other processes of this host map, or that one process shares with itself."""

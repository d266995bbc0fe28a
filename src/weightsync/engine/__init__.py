"""What runs in an engine's process: the agent, the session of one rank, its links to sources, and the adapter's protocol."""

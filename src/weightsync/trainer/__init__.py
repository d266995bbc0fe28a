"""What runs in a trainer's process: the agent, a rank's part of a round, and streams."""

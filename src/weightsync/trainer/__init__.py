"""What runs in a trainer's process: the agent, the publisher, the copy on the host, and memory in place."""

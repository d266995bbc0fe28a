"""What every process of a run shares: messages, calls, and the connection to a coordinator."""

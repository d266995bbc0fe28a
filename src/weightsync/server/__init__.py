"""The coordinator on the network: HTTP, the agents' WebSocket, tokens, settings."""

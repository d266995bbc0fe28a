"""The coordinator on the network: HTTP, the agents' WebSocket, tokens, settings. The only code that reads the environment."""

"""Contract suites for transports and engine adapters of third parties."""

"""A role joined to a coordinator: what trainer and engine processes use."""

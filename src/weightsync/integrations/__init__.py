"""Sources and engines of other frameworks. A framework is imported only where its own process loads the module."""

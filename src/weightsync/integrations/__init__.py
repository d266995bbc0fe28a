"""Sources and engines of other frameworks. Nothing here imports a framework: it works on the objects that the caller has."""

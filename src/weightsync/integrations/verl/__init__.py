"""verl: the checkpoint engine ``weightsync``, which verl finds by itself (0.9) or by the name of a module (0.8).

See ``docs/integrations/verl.md``. ``python -m weightsync.integrations verl`` checks an installation.
"""

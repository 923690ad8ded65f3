"""Generative priors: what pictures look like, learned from public records. One file per kind.

A prior is trained before any update is seen, by `leakgauge prior train` or inside the preparation
of an attack, and is a `Kept`: weights, and plain facts that say of which kind it is and what it was
trained on. In a folder it lies as `prior.safetensors` and `prior.json` (folder.py).
"""

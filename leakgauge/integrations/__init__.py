"""Other people's systems: the only modules that import them."""

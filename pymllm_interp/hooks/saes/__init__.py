"""Sparse autoencoders and transcoders: their weights, the files they come in, and an engine's registry of them."""

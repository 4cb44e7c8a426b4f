"""Transformer Engine: how it is installed without a CUDA toolkit, and whether what is installed can be used."""

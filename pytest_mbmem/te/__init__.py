"""Transformer Engine: its installation without a CUDA toolkit, whether it can be used, and the hardware it needs."""

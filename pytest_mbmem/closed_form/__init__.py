"""The parts of the closed-form estimate (`pytest_mbmem.estimate`): which layers a rank has, and what it keeps for them.

Imports neither torch nor Megatron.
"""

"""Compiled CPU kernels (numba) for recurrences that do not map to matrix products.

Modules in here import numba and work on numpy arrays; nothing imports them but `femixer.kernels.backend`, lazily.
"""

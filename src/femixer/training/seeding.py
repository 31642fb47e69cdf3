"""Random numbers as a function of a seed and of what they are for, so that nothing depends on what was drawn before."""

import hashlib

import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A 64-bit seed for one purpose, e.g. `derive(0, "train", step)`."""
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator for one purpose: equal arguments give equal numbers, other arguments unrelated ones."""
    return torch.Generator().manual_seed(derive(seed, *purpose))

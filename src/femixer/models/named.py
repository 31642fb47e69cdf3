"""The rows of the paper's tables by name: the fields of FEMConfig that make a model that row."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def fem(prior: str, parts: str = "CLTG", **options: Any) -> Fields:
    fields: Fields = {"mixer": "fem", "prior": prior, "parts": parts}
    return fields | ({"prior_options": {prior: options}} if options else {})


def baseline(mixer: str, **options: Any) -> Fields:
    return {"mixer": mixer} | ({"mixer_options": {mixer: options}} if options else {})


NAMED: dict[str, Fields] = {
    "SMAttn": baseline("attention"),
    "SMAttn+C": fem("softmax", "C"),
    "SMAttn+C,L": fem("softmax", "CL"),
    "SMAttn+C,L,T": fem("softmax", "CLT"),
    "FEM-SM": fem("softmax"),
    "SMAttn+L": fem("softmax", "L"),
    "SMAttn+L,T": fem("softmax", "LT"),
    "SMAttn+L,T,G": fem("softmax", "LTG"),
    "GLA": fem("gla", ""),
    "GLA+C": fem("gla", "C"),
    "GLA+C,L": fem("gla", "CL"),
    "GLA+C,L,T": fem("gla", "CLT"),
    "FEM-GLA": fem("gla"),
    "Mamba": fem("mamba", ""),
    "FEM-Mamba(-norm)": fem("mamba", normalize=False),
    "FEM-Mamba": fem("mamba"),
    "AFT": fem("aft", ""),
    "FEM-AFT": fem("aft"),
    "Hyena": baseline("hyena"),
    "DeltaNet": baseline("deltanet"),
    "LinAttn": baseline("linear-attention"),
    "LinAttn-learned": baseline("linear-attention", feature_map="learned"),
    "Mamba2": baseline("mamba2"),
    "GatedDeltaNet": baseline("gated-deltanet"),
    "DiffTrans": baseline("diff-transformer"),
    "RetNet": baseline("retnet"),
    "HGRN": baseline("hgrn"),
    "HGRN2": baseline("hgrn2"),
    "GSA": baseline("gsa"),
    "RWKV6": baseline("rwkv6"),
    "RWKV7": baseline("rwkv7"),
    "LASER": baseline("laser"),
    "GLA-published": baseline("gla"),
    "AFT-published": baseline("aft"),
    "Mamba-published": baseline("mamba"),
}
"""GLA, AFT and Mamba are our normalized priors with the mean as read; the published layers are named so."""

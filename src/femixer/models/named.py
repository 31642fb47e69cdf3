"""The rows of the paper's tables by name: the fields of FEMConfig that make a model that row."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def fem(prior: str, parts: str = "CLTG", **options: Any) -> Fields:
    fields: Fields = {"mixer": "fem", "prior": prior, "parts": parts}
    return fields | ({"prior_options": {prior: options}} if options else {})


def baseline(mixer: str, **options: Any) -> Fields:
    return {"mixer": mixer} | ({"mixer_options": {mixer: options}} if options else {})


FEW = 4
"""Heads of rivals whose memory is one matrix per head. They are published with few wide ones; with attention's many
narrow heads they could tell only as many keys apart as a head has channels."""

NAMED: dict[str, Fields] = {
    "SMAttn": baseline("attention"),
    "SMAttn+C": fem("softmax", "C"),
    "SMAttn+C,L": fem("softmax", "CL"),
    "SMAttn+C,L,T": fem("softmax", "CLT"),
    "FEM-SM": fem("softmax"),
    "SMAttn+L": fem("softmax", "L"),
    "SMAttn+L,T": fem("softmax", "LT"),
    "SMAttn+L,T,G": fem("softmax", "LTG"),
    "FoX": fem("fox", ""),
    "FEM-FoX": fem("fox"),
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
    "DeltaNet": baseline("deltanet", heads=FEW),
    "LinAttn": baseline("linear-attention"),
    "LinAttn-learned": baseline("linear-attention", feature_map="learned"),
    "Mamba2": baseline("mamba2"),
    "GatedDeltaNet": baseline("gated-deltanet", heads=FEW),
    "DiffTrans": baseline("diff-transformer"),
    "GatedAttn": baseline("gated-attention"),
    "FoX-published": baseline("fox"),
    "PaTH": baseline("path"),
    "KDA": baseline("kda", heads=FEW),
    "RetNet": baseline("retnet", heads=FEW),
    "TNN": baseline("tnn"),
    "HGRN": baseline("hgrn"),
    "HGRN2": baseline("hgrn2", heads=FEW),
    "GSA": baseline("gsa"),
    "GSA-64": baseline("gsa", heads=FEW, slots=64),
    "RWKV6": baseline("rwkv6", heads=FEW),
    "RWKV7": baseline("rwkv7", heads=FEW),
    "LASER": baseline("laser"),
    "GLA-published": baseline("gla", heads=FEW),
    "AFT-published": baseline("aft"),
    "Mamba-published": baseline("mamba"),
}
"""FoX, GLA, AFT and Mamba are our normalized priors with the mean as read; the published layers are named so."""

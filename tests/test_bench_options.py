"""Wrong options of `femixer bench` are named before anything is measured."""

import shlex
from pathlib import Path

import pytest

from femixer import bench

OF_ALL = [("--rounds 0", "rounds=0"), ("--batch 0", "batch=0"), ("--warmup -1", "warmup=-1")]
OF_PRIORS = [
    ("--priors sofmax", "priors='sofmax' is not allowed; choose one of softmax"),
    ("--priors gla gla", "priors="),
    ("--priors gla gla:dekay=head", "priors='gla:dekay=head'.*decay"),
    ("--parts LTX", "parts='LTX'"),
]
OF_MIXERS = [
    ("--dim 25 --heads 3", "dim=25"),
    ("--decode-steps 0", "decode_steps=0"),
    ("--decode-steps 1000", "decode_steps=1000"),
    ("--priors gla softmax:cache=valu", "cache='valu'"),
]
OF_ONE = {
    "layer": [
        ("--context 0", "context=0"),
        ("--priors attention", "priors='attention'"),
        ("--priors softmax:winow=3", "priors='softmax:winow=3'.*cache, .*window"),
        ("--priors softmax:window", "priors='softmax:window'"),
        ("--lengths 0", "lengths=0"),
        ("--forward-lengths -3", "forward_lengths=-3"),
        ("--lengths 8 --forward-lengths 8", "lengths with forward_lengths="),
        ("--modes eager eager", "modes="),
        ("--busy -1", "busy=-1"),
    ],
    "lm": [
        ("--dim 15 --heads 3", "dim=15"),
        ("--heads 8 --kv-heads 3", "kv_heads=3"),
        ("--kv-heads 0", "kv_heads=0"),
        ("--layers 0", "layers=0"),
        ("--vocabulary 0", "vocabulary=0"),
        ("--length 1", "length=1"),
        ("--contexts 1", "contexts=1"),
        ("--contexts 8 8", "contexts="),
        ("--decode-batch 0", "decode_batch=0"),
    ],
    "scaling": [
        ("--priors attention:window=3", "priors='attention:window=3'"),
        ("--lengths 8 8", "lengths="),
        ("--lengths 0", "lengths=0"),
        ("--positions -1", "positions=-1"),
        ("--quadratic-limit 0", "quadratic_limit=0"),
        ("--quadratic-limit 7 --lengths 8", "quadratic_limit=7 is not allowed; choose at least 8"),
    ],
    "vision": [
        ("--preset tiny", "preset='tiny'.*deit-tiny"),
        ("--image-size 100", "image_size=100.*patch_size=16"),
        ("--image-size 0", "image_size=0"),
        ("--positions sine", "positions='sine'"),
        ("--positions rotary --priors aft", "positions='rotary' does not fit prior='aft'"),
    ],
    "forecast": [
        ("--models SMAttn", "models='SMAttn' is not allowed"),
        ("--models FEM-SM FEM-SM", "models="),
        ("--horizon 0", "horizon=0 is not allowed; choose a whole number above 0"),
    ],
    "speed": [
        ("--rows Sofmax", "rows='Sofmax' is not allowed; choose some of SMAttn, SMAttn\\+C"),
        ("--dim 15", "dim=15 is not allowed; choose a multiple of 8"),
        ("--layers 0", "layers=0 is not allowed"),
    ],
}
CASES = [
    (name, *case)
    for name, own in OF_ONE.items()
    for case in [
        *(own + OF_ALL),
        *(OF_PRIORS if name in ("layer", "lm", "scaling", "vision") else ()),
        *(OF_MIXERS if name in ("layer", "lm", "scaling") else ()),
    ]
]


@pytest.mark.parametrize(("name", "given", "message"), CASES)
def test_wrong_input_is_named_before_anything_is_measured(name: str, given: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        bench.main([name, *shlex.split(given), "--out", str(tmp_path)])
    assert not any(tmp_path.iterdir())


def test_an_unknown_benchmark_is_named() -> None:
    with pytest.raises(ValueError, match="command='laier'"):
        bench.main(["laier"])

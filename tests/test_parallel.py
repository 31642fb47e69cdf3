"""Several ranks compute what one computes: sequences, heads and batches divided over them (parallel_cases.py)."""

import json
from typing import Any

import pytest
import torch
from parallel_cases import process
from started import Started
from torch import Tensor

from femixer.parallel.context import carried_energies, carried_reads, carried_sums


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By the number of ranks, what each of them found: of pairs, all first and all second ones together."""
    folder = tmp_path_factory.mktemp("parallel")
    ranks = [Started(process, folder, rank, FEMIXER_BACKEND="plain") for rank in range(4)]
    for ended in [rank.end(400) for rank in ranks]:
        assert ended.code == 0, ended.err
    each = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    return {2: [each[rank]["2"] | each[rank + 2]["2"] for rank in range(2)], 4: [found["4"] for found in each]}


def tolerance(name: str) -> float:
    """Features of linear attention may all be 1e-6: weights of 1e-12, whose float64 gradients have fewer digits; so has
    that of beta where values are of a thousand."""
    if "float32" in name:
        return 1e-5
    return 1e-8 if any(word in name for word in ("linear", "gla", "large")) else 1e-10


@pytest.mark.parametrize(
    ("ranks", "what", "count"),
    [
        (2, "cp ", 81),
        (2, "tp ", 16),
        (4, "cp ", 19),
        (2, "ring ", 9),
        (4, "ring ", 9),
        (2, "lm ", 5),
        (2, "resumed", 1),
        (4, "lm ", 7),
        (4, "transformers", 1),
    ],
)
def test_divided_over_ranks_all_is_as_in_one_process(outcomes, ranks: int, what: str, count: int) -> None:
    for outcome in outcomes[ranks]:
        found = {name: errors for name, errors in outcome.items() if name.startswith(what)}
        assert len(found) == count
        wrong = {}
        for name, errors in found.items():
            assert isinstance(errors, dict), f"{name}: {errors}"
            wrong |= {(name, at): error for at, error in errors.items() if not error <= tolerance(name)}
        assert not wrong


def test_bytes_are_those_of_the_formulas(outcomes) -> None:
    for outcome in outcomes[2]:
        found = {name: counted for name, counted in outcome.items() if name.startswith("bytes")}
        assert len(found) == 18
        for name, counted in found.items():
            assert counted[:2] == counted[2:], name
        for kind in ("linear", "gla", "mamba"):
            assert found[f"bytes {kind}, 4"] == found[f"bytes {kind}, 10"]  # whatever the length


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dimensions", "mesh has dimensions ('rows',); allowed are names among dp, dp_replicate, dp_shard, cp, tp"),
        ("heads", "heads=3 cannot be divided among 2 ranks of 'tp'; allowed is a multiple"),
        ("kv_heads", "kv_heads=1 cannot be divided among 2 ranks of 'tp'; allowed is a multiple"),
        ("width", "intermediate_size=33 cannot be divided among 2 ranks of 'tp'; allowed is a multiple"),
        ("bias", "score_bias does not fit 'tp': it scores all heads at once"),
        ("length", "7 tokens cannot be cut into 2 equal stretches on 2 ranks; allowed is a multiple of 2"),
        ("zigzag", "6 tokens cannot be cut into 4 equal stretches on 2 ranks; allowed is a multiple of 4"),
        ("rival", "mixer=DeltaNet cannot be divided over 'cp' or 'tp'; choose fem"),
        ("model", "model is Linear; allowed is FreeEnergyMixer, FEMModel or FEMForCausalLM"),
        ("twice", "the model is divided over ranks already"),
        ("cache", "use_cache does not fit a sequence that is cut over ranks; leave it out"),
        ("state", "state and return_state do not fit a sequence that is cut over ranks"),
        (
            "saving",
            "the weights of this model are divided over processes; gather them in all of these, and save in one: "
            "save_pretrained(folder, state_dict=femixer.parallel.full_state_dict(model))",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(outcomes, name: str, message: str) -> None:
    assert [outcome[f"refused {name}"] for outcome in outcomes[2]] == [message] * 2


def test_too_few_processes_are_refused(outcomes) -> None:
    assert all("8" in outcome["refused mesh"] and "4" in outcome["refused mesh"] for outcome in outcomes[2])


def stretch_states(seed: int) -> list[tuple[Tensor, ...]]:
    """Sums, exponentials, their tops and decays of five stretches, one of them empty and one with a new segment."""
    random = torch.Generator().manual_seed(seed)
    sums, energies = torch.rand(2, 5, 3, 7, 2, dtype=torch.float64, generator=random)
    top = 300 * torch.randn(5, 3, 1, 2, dtype=torch.float64, generator=random)
    decay = -20 * torch.rand(5, 3, 7, 1, dtype=torch.float64, generator=random)
    sums[1] = energies[1] = 0
    top[1], decay[3, 1] = -torch.inf, -torch.inf
    return [*zip(sums, energies, top, decay, strict=True)]


def joined(states: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    sums, energies, top, decay = (torch.stack(x) for x in zip(*states, strict=True))
    count = len(states)
    return carried_sums(sums, decay, count), *carried_energies(energies, top, decay, count), decay.sum(0)


@pytest.mark.parametrize("seed", range(3))
def test_combination_of_states_is_associative(seed: int) -> None:
    a, b, c, d, e = stretch_states(seed)
    at_once = joined([a, b, c, d, e])
    for stepwise in (
        joined([joined([joined([joined([a, b]), c]), d]), e]),
        joined([a, joined([b, joined([c, joined([d, e])])])]),
        joined([joined([a, b]), joined([c, d, e])]),
    ):
        sums, energies, top, decay = stepwise
        torch.testing.assert_close(sums, at_once[0], rtol=1e-13, atol=0)
        # The top is no larger than what it stands for and no part of it: compared are the exponentials themselves.
        torch.testing.assert_close(energies * (top - at_once[2]).exp(), at_once[1], rtol=1e-11, atol=0)
        torch.testing.assert_close(decay, at_once[3])


@pytest.mark.parametrize("seed", range(3))
def test_combination_of_reads_is_associative(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    states = 30 * torch.randn(4, 2, 3, 5, dtype=torch.float64, generator=random)
    states[1, 0] = torch.tensor([-torch.inf, 0, 0], dtype=torch.float64)[:, None]
    decay = -10 * torch.rand(4, 2, 5, dtype=torch.float64, generator=random)
    decay[2, 1] = -torch.inf
    beta = 0.3 + torch.rand(5, dtype=torch.float64, generator=random)
    at_once = carried_reads(states, decay, beta, 4)
    pairs = [carried_reads(states[i : i + 2], decay[i : i + 2], beta, 2) for i in (0, 2)]
    stepwise = carried_reads(torch.stack(pairs), torch.stack([decay[:2].sum(0), decay[2:].sum(0)]), beta, 2)
    torch.testing.assert_close(stepwise, at_once, rtol=1e-12, atol=1e-12)

"""The paper's statements about what heads, depth, token-separable reads and fixed states cannot do, and what the
alternatives cost, on real layers where there is one. Where the paper's wording is wrong, the test holds the true
statement and its docstring says what differs. The free energy itself: test_propositions*.py."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from problems import generator_of, of_seeds
from torch import Tensor
from torch.testing import assert_close

from femixer import FreeEnergyMixer
from femixer.bench.calls import flops
from femixer.cli import main
from femixer.free_energy import free_energy
from femixer.free_energy import posterior as tilted
from femixer.theory import hull_gap, mixed_difference, most_patterns, patterns, per_dimension_cost, value_ranks
from femixer.theory.command import cost, head_table, nodes, state_numbers, state_table


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator_of(seed), dtype=torch.float64)


def layer(parts: str, heads: int, dim: int = 4, prior: str = "softmax", **options: object) -> FreeEnergyMixer:
    torch.manual_seed(0)
    mixer = FreeEnergyMixer(dim, heads, prior, parts, dtype=torch.float64, **options).requires_grad_(False)
    for name, parameter in mixer.named_parameters():
        if name.endswith("weight"):
            parameter.normal_()
    return mixer


def chosen(mixer: FreeEnergyMixer, x: Tensor, posterior: bool) -> Tensor:
    """What each channel weighs at the last token: [N, T, C]."""
    projected, layout = mixer.prepare(x)
    p = mixer.prior.weights(projected.inputs, layout, torch.tensor([x.shape[1] - 1]))
    q = tilted(p, projected.v.transpose(1, 2), mixer.beta_max[:, None] if posterior else 0.0)
    return q[:, :, 0].permute(0, 2, 1, 3).flatten(2)


# Heads and depth


def test_heads_choose_in_t_to_the_h_ways_and_the_free_energy_in_t_to_the_d() -> None:
    """Over many contexts of three tokens all 3^2 choices of two heads occur, and no others; with the free energy each
    of the four channels chooses for itself, in all 3^4 ways."""
    x = 2 * normal(1, 1500, 3, 4)
    attention = patterns(chosen(layer("", 2), x, False))
    assert len(attention) == most_patterns(3, 4, heads=2) == 9
    assert all(a == b and c == d for a, b, c, d in attention)  # the channels of a head together
    cold = layer("L", 2)
    cold.raw_beta.fill_(40.0)
    cold.value_proj.linear.weight.copy_(torch.eye(4))
    cold.prior_proj.linear.weight.mul_(0.1)
    assert patterns(chosen(cold, x, True)) == {*itertools.product(range(3), repeat=4)}
    assert most_patterns(3, 4) == 81


def test_selection_budget_of_two_layers_is_heads_times_layers() -> None:
    """Channel 0 is mixed first by layer one, channel 1 by layer two, as far as the residual carries it unmixed: all 3^2
    patterns, with one head each. A third channel must go with one of them, so that D selections need H L >= D."""
    one, two = layer("", 1), layer("", 1)
    two.prior_proj.linear.weight.copy_(normal(5, *two.prior_proj.linear.weight.shape))
    one.out_proj.weight[1:] = 0  # writes to channel 0 only
    x = 2 * normal(2, 600, 3, 4)
    first = chosen(one, x, False)[..., 0]
    second = chosen(two, x + one(x), False)[..., 0]
    assert len(patterns(torch.stack([first, second], -1))) == most_patterns(3, 4, heads=1, layers=2) == 9
    assert len(patterns(torch.stack([first, second, second], -1))) == 9 < most_patterns(3, 3)
    for h, depth, d in itertools.product((1, 2, 3), (1, 2, 3), (2, 4, 6)):
        assert (most_patterns(3, d, h, depth) == most_patterns(3, d)) == (h * depth >= d)


@of_seeds()
def test_one_mixed_token_does_not_determine_the_channel_wise_maximum(seed: int) -> None:
    """The lemma's true core. Two sets of values with the same mixed token have maxima 2 delta apart, so that every
    function of that token (coordinate-wise or not) is off by delta for one of them."""
    alpha, v = normal(seed, 5).softmax(-1), normal(seed + 1, 5, 3)
    delta = 1.7
    top = v.argmax(0)
    other = (top + 1) % 5
    raised = v.clone()
    raised[top, range(3)] += 2 * delta
    raised[other, range(3)] -= 2 * delta * alpha[top] / alpha[other]
    assert_close(alpha @ raised, alpha @ v)
    assert_close(raised.amax(0) - v.amax(0), torch.full((3,), 2 * delta, dtype=torch.float64))


def test_a_coordinate_wise_map_unmixes_digits() -> None:
    """As printed (no selector outside the hull by composing coordinate-wise maps) the lemma is false: of digits the
    weights 10/11 and 1/11 keep both, and a map of one number returns the larger. It needs values from an open set."""
    alpha = torch.tensor([10.0, 1.0], dtype=torch.float64) / 11
    for a, b in itertools.product(range(10), repeat=2):
        mixed = alpha @ torch.tensor([a, b], dtype=torch.float64)
        assert max(divmod(round(11 * mixed.item()), 10)) == max(a, b)


def test_all_mixed_tokens_together_do_determine_the_values() -> None:
    """Nor is the past lost to later layers, as the paper says: a causal softmax has a positive diagonal, so that the
    mixed tokens of all steps can be solved for the values. What is lost is lost to reads of step t alone."""
    mixer = layer("", 1)
    x = normal(3, 1, 5, 4)
    seen = mixer.inspect(x)
    assert_close(torch.linalg.solve(seen.prior[0, 0], seen.mean[0, 0]), seen.value[0, 0], rtol=1e-6, atol=1e-8)


def test_heads_have_the_rank_of_their_value_channels() -> None:
    """rank(W_O W_V) of a head: dim / H in attention, half of it in FEM, where value channels are half as many."""
    for heads in (1, 2, 4):
        assert value_ranks(layer("", heads, 8)) == [8 // heads] * heads
        assert value_ranks(layer("LTG", heads, 8)) == [4 // heads] * heads
    assert value_ranks(layer("", 4, 8, kv_heads=2)) == [2] * 4


# Token-separable reads


@of_seeds()
def test_separable_reads_lie_in_the_hull_of_their_transformed_values(seed: int) -> None:
    """(i), (ii): sum_i p(i) s(b v_i) is below max_i w . s(b v_i) in every direction w. The channel-wise maximum, passed
    through the same increasing map, is outside by the hull's gap unless one token has all maxima."""
    p, v, directions = normal(seed, 5).softmax(-1), normal(seed + 1, 5, 3), normal(seed + 2, 3, 40)
    b = normal(seed + 3, 3).exp()
    for transform in (lambda x: x, torch.tanh, lambda x: x.clamp(min=0) + 0.1 * x):
        moved = transform(b * v)
        read = p @ moved
        assert (read @ directions <= (moved @ directions).amax(0) + 1e-12).all()
        target = transform(b * v.amax(0))
        assert_close(target, moved.amax(0))
        gap = hull_gap(moved)
        assert gap > 0 or len(set(v.argmax(0).tolist())) == 1
        assert (target - read).sum() >= gap - 1e-12


def test_a_scaled_hull_can_contain_the_maximum() -> None:
    """(ii) as printed (no recovery of the original coordinates in general) needs the map undone: with s(x) = 2 x the
    mean of two tokens is their channel-wise maximum itself."""
    v = torch.eye(2, dtype=torch.float64)
    assert hull_gap(v) == 1
    assert_close(torch.full((2,), 0.5, dtype=torch.float64) @ (2 * v), v.amax(0))


@of_seeds()
def test_no_sum_over_tokens_is_the_maximum(seed: int) -> None:
    """(iii): a sum of functions of one token each has no mixed difference, the maximum has -1; so one of four inputs is
    off by 1/4. The paper's proof swaps two equal tokens, which the maximum survives as well as the sum."""
    a, b, c, d = normal(seed, 4)

    def separable(v: Tensor) -> Tensor:
        return (a * v[0] + b * v[0] ** 3).exp() + torch.sin(c * v[1] + d)

    assert abs(mixed_difference(separable).item()) < 1e-12
    assert mixed_difference(lambda v: v.amax(0)).item() == -1.0
    corners = [torch.tensor([[x], [y]], dtype=torch.float64) for x in (0.0, 1.0) for y in (0.0, 1.0)]
    assert max((separable(v) - v.amax(0)).abs().item() for v in corners) >= 0.25
    assert_close(separable(corners[1]) + separable(corners[2]), separable(corners[0]) + separable(corners[3]))


def test_the_free_energy_is_a_sum_over_tokens_and_a_logarithm() -> None:
    """So it is the one map after the sum that competition between tokens needs: the mixed difference goes to the
    maximum's like 1 / beta, and to the mean's, zero, with beta."""
    p = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    for beta in (1e-3, 1.0, 10.0, 100.0):
        found = mixed_difference(lambda v, beta=beta: free_energy(p, v, beta)).item()
        assert found == pytest.approx(1 - 2 / beta * math.log((1 + math.exp(beta)) / 2), abs=1e-9)
        assert found < 0
    assert found == pytest.approx(-1 + 2 * math.log(2) / 100, abs=1e-9)


def test_gates_of_the_reads_realize_functions_of_the_reads_and_no_others() -> None:
    """Containment (iii). Gates that see p, mu and F make every Phi(p, mu, F) with the read's sign; but not, as the
    paper says, every sum_i f(p(i), v_i): two sets of values here agree in p, mu and F and not in sum_i p(i) v_i^2."""
    p = torch.full((1, 3), 1 / 3, dtype=torch.float64)

    def values(first: float) -> Tensor:
        """With sum v = 3 and sum exp(v) = 14, one of them given: the others are roots of a quadratic."""
        total, product = 14 - math.exp(first), math.exp(3 - first)
        root = math.sqrt(total**2 / 4 - product)
        return torch.tensor([[first], [math.log(total / 2 + root)], [math.log(total / 2 - root)]], dtype=torch.float64)

    one, two = values(0.0), values(1.0)
    for beta in (0.0, 1.0):
        assert_close(free_energy(p, one, beta), free_energy(p, two, beta))
    assert abs((p @ one**2 - p @ two**2).item()) > 0.1
    mean, free = free_energy(p, one, 0.0), free_energy(p, one, 1.0)
    target = (mean * free).exp() + 3
    gate = target / torch.lerp(mean, free, torch.tensor(0.3, dtype=torch.float64))
    assert gate > 0
    assert_close(gate * (0.7 * mean + 0.3 * free), target)


# Storage and costs


@pytest.mark.parametrize("prior", ["linear", "gla", "decay", "ssm", "softmax"])
def test_a_fixed_state_cannot_store_and_a_cache_can(prior: str) -> None:
    """The state is linear in the values and has fewer numbers than they are: values five apart leave the same state,
    and every later read is the same. That needs no contraction, which the paper assumes. A cache tells them apart."""
    mixer = layer("", 1, 4, prior)
    width = mixer.widths.value
    x, v = normal(7, 1, 17, 4), normal(8, 1, 13, 1, width)
    projected, layout = mixer.prepare(x[:, :13])
    later, after = mixer.prepare(x)

    def futures(v: Tensor) -> Tensor:
        """Reads of the four later tokens, as the values of the first 13 determine them: [4, D]"""
        values = torch.cat([v, later.v[:, 13:]], 1)
        return mixer.prior.read(later.inputs, values, None, after, None, False)[0][0, 13:, 0]

    def state(v: Tensor) -> Tensor:
        _, _, held = mixer.prior.read(projected.inputs, v, None, layout, None, True)
        numbers = torch.cat([t.flatten().double() for t in tree(held) if t.is_floating_point()])
        return numbers[numbers.isfinite()]  # the largest exponent so far is -inf without a free energy

    def matrix(f: object) -> Tensor:
        base = f(torch.zeros_like(v))
        columns = torch.eye(v.numel(), dtype=v.dtype).view(-1, *v.shape)
        return torch.stack([(f(column) - base).flatten() for column in columns], 1)

    left = torch.linalg.svd(matrix(state))
    rank = int((left.S / left.S[0] > 1e-9).sum())
    if prior == "softmax":
        assert rank == v.numel()
        return
    assert rank < v.numel()
    blind = left.Vh[-1].view_as(v)  # of length one
    assert_close(state(v + 5 * blind), state(v), rtol=0, atol=1e-9)
    assert_close(futures(v + 5 * blind), futures(v), rtol=0, atol=1e-9)
    seen = left.Vh[0].view_as(v)
    assert (futures(v + 5 * seen) - futures(v)).abs().max() > 1e-3


def tree(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if hasattr(value, "tensor"):
        return [value.tensor]
    return [t for item in value for t in tree(item)] if isinstance(value, (tuple, list)) else []


def test_states_do_not_grow_and_caches_do() -> None:
    sizes = {}
    for prior in ("softmax", "gla", "aft", "mamba"):
        mixer = FreeEnergyMixer(24, 3, prior, device="meta")
        sizes[prior] = [state_numbers(mixer, tokens) for tokens in (29, 31)]
    per_token = 24 + 12  # keys of dim, values of half of it
    assert sizes["softmax"][1] - sizes["softmax"][0] == 2 * per_token
    assert all(before == after for prior, (before, after) in sizes.items() if prior != "softmax")


@pytest.mark.parametrize(("heads", "width"), [(3, 4), (12, 4), (12, 1)])
def test_cost_of_scores_per_dimension(heads: int, width: int) -> None:
    """Counted on attention with so many heads. A scoring subspace of width d for each of D channels costs d times the
    scores and D / H times the weights: D^2 d parameters. The paper's "from d^2 to D d" counts a head's own square."""
    dim, length = 12, 7
    q, k = (torch.empty(dim, heads * width, device="meta") for _ in range(2))
    v, o = (torch.empty(dim, dim, device="meta") for _ in range(2))
    x = torch.empty(length, dim, device="meta")
    numbers = {}

    def attend() -> None:
        queries, keys = ((x @ w).view(length, heads, width).transpose(0, 1) for w in (q, k))
        p = (queries @ keys.transpose(1, 2)).softmax(-1)
        numbers["weights"] = p.numel()
        (p @ (x @ v).view(length, heads, dim // heads).transpose(0, 1)).transpose(0, 1).reshape(length, dim) @ o

    expected = per_dimension_cost(dim, length, heads, width)
    assert flops(attend) == expected.flops
    assert numbers["weights"] == expected.weights
    assert sum(w.numel() for w in (q, k, v, o)) == expected.parameters


def test_costs_of_the_nodes() -> None:
    """A general map costs T^2, an additive one T^3: the paper's T^2 counts the maps, each of which reads a past of T
    tokens. Attention costs T^2 and a fixed state T; the free energy adds no matrix product to attention."""
    dim, lengths = 8, (512, 1024)
    costs = [{name: cost(n, dim, t) for name, n in nodes(dim, t, 2, device="meta").items()} for t in lengths]
    growth = {name: math.log2(costs[1][name].flops / costs[0][name].flops) for name in costs[0]}
    general, additive, _, attention, fixed = growth.values()
    assert general == pytest.approx(2, abs=0.01) and additive == pytest.approx(3, abs=0.01)
    assert 1.9 < attention <= 2 and fixed == pytest.approx(1, abs=0.01)
    assert costs[1]["FEM, softmax prior"].flops == costs[1]["(2) attention"].flops
    kept = [[c.kept for c in each.values()] for each in costs]
    ratios = [after / before for before, after in zip(*kept, strict=True)]
    assert ratios[:4] == pytest.approx([2.0] * 4, abs=0.01) and ratios[4] == 1.0
    assert kept[1][2] < kept[1][3]  # FEM's value channels are half as many


def test_additive_and_general_maps_compute_what_they_say() -> None:
    """Causal: a later token changes nothing before it. Additive: the sum of g(x_i, past) over the pairs, by hand."""
    torch.manual_seed(0)
    x = torch.randn(1, 5, 4)
    changed = torch.cat([x[:, :3], 9 * torch.randn(1, 2, 4)], 1)
    for name, node in [*nodes(4, 5, 1).items()][:2]:
        assert_close(node(x)[:, :3], node(changed)[:, :3], msg=name)
        assert (node(x)[:, 4] - node(changed)[:, 4]).abs().max() > 1e-3
    past = torch.cat([x[0, :3].flatten(), torch.zeros(8)])
    by_hand = sum(node.down(node.up(torch.cat([x[0, i], past])).relu()) for i in range(3))
    assert_close(node(x)[0, 2], by_hand)


def test_additive_maps_that_see_the_past_are_general_maps() -> None:
    """The paper has them exclude what is not additive. But g(x_i, past) = f(past) / t adds up to f(past)."""
    torch.manual_seed(0)
    general, additive = [*nodes(4, 5, 1).values()][:2]
    with torch.no_grad():
        additive.up.weight.copy_(torch.cat([torch.zeros(4, 4), general.up.weight], 1))
    additive.up.bias, additive.down = general.up.bias, general.down
    x = torch.randn(1, 5, 4)
    assert_close(additive(x) / torch.arange(1, 6)[:, None], general(x))


def test_the_page_has_the_commands_numbers() -> None:
    page = (Path(__file__).parent.parent / "docs" / "theory.md").read_text(encoding="utf-8")
    for table in (head_table(), state_table()):
        for row in table.rows:
            assert f"| {' | '.join(row)} |" in page


def test_command_refuses_lengths_that_do_not_double(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "--lengths", "64", "100"]) == 2
    assert "lengths=(64, 100) is not allowed; choose two or more, each twice the one before" in capsys.readouterr().err

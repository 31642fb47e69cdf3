"""The MAD tasks against readings of their rules in plain Python, which the worked examples of the original anchor."""

import re
from collections import Counter
from itertools import groupby, permutations

import numpy as np
import pytest

from femixer.tasks.mad import IGNORE, TASKS, sample
from femixer.tasks.mad.data import value_of_key


def tokens(text: str) -> list[int]:
    """The notation of the examples: `.` is the ignore index."""
    return [IGNORE if word == "." else int(word) for word in text.split()]


RECALL = (
    tokens("5 12 2 10 0 8 0 8 1 14 5 12 7 12 4 15 5 12 5 12 4 15 1"),
    tokens("12 2 10 0 8 0 8 1 14 5 12 7 12 4 15 5 12 5 12 4 15 1 14"),
    tokens(". . . . . . 8 . . . 12 . . . . . 12 . 12 . 15 . 14"),
)
NOISY = (
    tokens("5 10 16 18 6 12 4 13 4 13 5 10 0 12 0 12 17 29 0 12 2 11 4"),
    tokens(". . . . . . . . 13 . 10 . . . 12 . . . 12 . . . 13"),
)
FUZZY = (
    [15] * 7 + tokens("2 3 5 11 12 8 5 2 0 8 13 11 6 2 3 13 8 5 1 6 7 2 6 1 10 13 9 5 4 6 8 6 5 1 13 9 5 2 0 8 13"),
    [IGNORE] * 45 + [8, 13, 11],
)
COPYING = (
    tokens("14 11 14 8 14 7 14 14 14 14 3 14 14 4 14 14 0 15 14 14 14 14 14 14"),
    [IGNORE] * 18 + [11, 8, 7, 3, 4, 0],
)
MEMORIZATION = (
    tokens("1 15 2 15 3 15 0 15 4 15 4 15 4 15 3 15"),
    tokens(". 8 . 14 . 11 . 13 . 9 . 9 . 9 . 11"),
)


def recall_reading(inputs: list[int], keys: int) -> list[int]:
    """Test targets: the values of keys that were shown before, as they were shown first."""
    value: dict[int, int] = {}
    targets = [IGNORE] * len(inputs)
    for at in range(0, len(inputs), 2):
        key = inputs[at]
        if key < keys and key in value:
            targets[at] = value[key]
        elif key < keys:
            value[key] = inputs[at + 1]
    return targets


def fuzzy_pairs(inputs: list[int], targets: list[int], vocabulary: int) -> list[tuple[tuple[int, ...], ...]]:
    """Keys and values, alternating: runs of one kind of token are motifs."""
    sequence = [token for token in [*inputs, targets[-1]] if token != vocabulary - 1]
    runs = [tuple(run) for _, run in groupby(sequence, key=lambda token: token >= (vocabulary - 1) // 2)]
    return list(zip(runs[::2], runs[1::2], strict=True))


def fuzzy_reading(inputs: list[int], targets: list[int], vocabulary: int) -> tuple[list[int], bool]:
    """Test targets, and whether the last value can be known."""
    pairs = fuzzy_pairs(inputs, targets, vocabulary)
    value: dict[tuple[int, ...], tuple[int, ...]] = {}
    scored: list[int] = []
    for at, (key, own) in enumerate(pairs):
        known = key in value
        assert value.setdefault(key, own) == own  # fixed at the first use
        scored += [IGNORE] * len(key) + (list(own) if known or at == len(pairs) - 1 else [IGNORE] * len(own))
    return [IGNORE] * (len(inputs) - len(scored) + 1) + scored[1:], known


def copying_reading(inputs: list[int], vocabulary: int) -> list[int]:
    content = [token for token in inputs if token < vocabulary - 2]
    assert inputs[len(inputs) - len(content) - 1] == vocabulary - 1
    assert inputs[len(inputs) - len(content) - 2] == content[-1]
    assert inputs[len(inputs) - len(content) :] == [vocabulary - 2] * len(content)
    return [IGNORE] * (len(inputs) - len(content)) + content


def rows(task: str, n: int, split: str = "test", **parameters):
    inputs, targets = sample(task, n, split, **parameters)
    assert inputs.dtype == targets.dtype == np.int64 and inputs.shape == targets.shape
    return list(zip(inputs.tolist(), targets.tolist(), strict=True))


def test_the_readings_agree_with_the_worked_examples() -> None:
    inputs, train, test = RECALL
    assert recall_reading(inputs, 8) == test and [*inputs[1:], test[-1]] == train
    inputs, test = NOISY
    assert recall_reading(inputs, 8) == test
    assert fuzzy_reading(*FUZZY, 16) == (FUZZY[1], True)
    assert copying_reading(COPYING[0], 16) == COPYING[1]
    assert all(MEMORIZATION[1][at] == IGNORE for at in range(0, 16, 2))


@pytest.mark.parametrize(
    ("task", "parameters", "keys"),
    [
        ("recall", {"length": 24}, 8),
        ("recall", {"vocabulary": 23, "length": 62}, 11),
        ("noisy-recall", {"length": 24}, 8),
        ("noisy-recall", {"vocabulary": 48, "length": 62, "noise": 0.6}, 16),
        ("noisy-recall", {"vocabulary": 16, "length": 4, "noise": 0.99, "noise_vocabulary": 3}, 6),
    ],
)
def test_recall_scores_the_values_of_keys_shown_before(task: str, parameters: dict, keys: int) -> None:
    vocabulary = {**TASKS[task].defaults, **parameters}["vocabulary"]
    noise = vocabulary - {**TASKS[task].defaults, **parameters}.get("noise_vocabulary", 0)
    for inputs, targets in rows(task, 307, **parameters):
        assert len(inputs) == parameters["length"] - 1
        assert targets == recall_reading(inputs, keys) and targets[-1] != IGNORE
        for key, value in zip(inputs[::2], [*inputs[1::2], targets[-1]], strict=True):
            assert (key < keys <= value < noise) or noise <= min(key, value) <= max(key, value) < vocabulary
    for inputs, targets in rows(task, 31, "train", **parameters):
        assert targets[:-1] == inputs[1:] and targets[-1] == recall_reading(inputs, keys)[-1]


@pytest.mark.parametrize("task", ["recall", "noisy-recall"])
def test_recall_with_a_single_query_scores_the_last_value_after_a_prefix(task: str) -> None:
    keys = 7  # of 15 tokens that are neither noise nor the prefix
    for inputs, targets in rows(task, 101, length=36, single_query=True):
        assert len(inputs) == 36 and inputs[-2] == TASKS[task].defaults["vocabulary"] - 1 not in inputs[:-2]
        assert [at for at, target in enumerate(targets) if target != IGNORE] == [35]
        assert targets[-1] == recall_reading(inputs[:-2] + inputs[-1:], keys)[-1]


@pytest.mark.parametrize("parameters", [{}, {"length": 48}, {"vocabulary": 9, "length": 31, "motif": 2}])
def test_fuzzy_recall_scores_the_motifs_of_keys_shown_before(parameters: dict) -> None:
    vocabulary, length, motif = (
        {**TASKS["fuzzy-recall"].defaults, **parameters}[n] for n in ("vocabulary", "length", "motif")
    )
    for split in ("test", "train"):
        sizes = set()
        for inputs, targets in rows("fuzzy-recall", 307, split, **parameters):
            assert len(inputs) == length
            read = fuzzy_reading(inputs, targets, vocabulary)[0]
            assert targets == ([*inputs[1:], read[-1]] if split == "train" else read)
            for pair in fuzzy_pairs(inputs, targets, vocabulary):
                assert all(len({*part}) == len(part) for part in pair)
                sizes.add(tuple(map(len, pair)))
        keys = [motif] if split == "test" else range(1, motif + 1)
        assert sizes == {(key, value) for key in keys for value in range(1, motif + 1)}


def fuzzy_sequence(rng: np.random.Generator, V: int, L: int, motif: int, training: bool) -> tuple[int, int, bool]:
    """The process one pair at a time. Returns the number of pads, of scored tokens, and whether the probe is known."""
    keys = (V - 1) // 2

    def draw(tokens: int, fixed: bool = False) -> tuple[int, ...]:
        return tuple(rng.permutation(tokens)[: motif if fixed else rng.integers(1, motif + 1)].tolist())

    probe, probe_value = draw(keys, not training), draw(V - 1 - keys)
    both = len(probe) + len(probe_value)
    place, length, scored, added = rng.integers(L - 2 * both), 0, len(probe_value), False
    value = {}
    while length < L - both - 2 * motif:
        if length >= place and not added:
            key, own, added = probe, probe_value, True
        else:
            key, own = draw(keys, not training), draw(V - 1 - keys)
            if key == probe:
                own, added = probe_value, True
        scored += len(value.get(key, ()))
        length += len(key) + len(value.setdefault(key, own))
    return L + 1 - length - both, scored, probe in value


@pytest.mark.parametrize("sizes", [(16, 128, 3), (9, 37, 2)])
@pytest.mark.parametrize("split", ["train", "test"])
def test_fuzzy_recall_is_distributed_as_the_process(sizes: tuple[int, int, int], split: str) -> None:
    """(9, 37, 2) has 12 or 16 keys, so that the probe's key often appears by chance."""
    rng = np.random.default_rng(5)
    naive = np.array([fuzzy_sequence(rng, *sizes, split == "train") for _ in range(700)], float)
    V, L, motif = sizes
    ours = []
    for inputs, targets in rows("fuzzy-recall", 2000, split, vocabulary=V, length=L, motif=motif):
        scored, known = fuzzy_reading(inputs, targets, V)
        ours.append((inputs.count(V - 1), sum(target != IGNORE for target in scored), known))
    error = np.hypot(naive.std(0) / 700**0.5, np.std(ours, 0) / 2000**0.5)
    assert (np.abs(naive.mean(0) - np.mean(ours, 0)) < 4 * error).all()


def test_some_probes_of_fuzzy_recall_cannot_be_known() -> None:
    """No pair begins at their place or later, and before the sequence is long enough."""
    known = [fuzzy_reading(inputs, targets, 16)[1] for inputs, targets in rows("fuzzy-recall", 6000)]
    assert 1 - np.mean(known) == pytest.approx(0.026, abs=0.008)


@pytest.mark.parametrize(("vocabulary", "length", "copies"), [(16, 256, 16), (16, 24, 6), (5, 4, 1), (7, 40, 19)])
def test_copying_asks_for_the_content_in_order(vocabulary: int, length: int, copies: int) -> None:
    for split in ("train", "test"):
        for inputs, targets in rows(
            "selective-copying", 103, split, vocabulary=vocabulary, length=length, copies=copies
        ):
            assert targets == copying_reading(inputs, vocabulary)
            assert len(inputs) == length and sum(target != IGNORE for target in targets) == copies


def test_compression_asks_for_its_input() -> None:
    for inputs, targets in rows("compression", 53, length=13):
        assert inputs == targets and len(inputs) == 13 and inputs[-1] == 15 and max(inputs[:-1]) < 15


@pytest.mark.parametrize("vocabulary", [16, 17, 256])
def test_memorization_has_one_map_in_all_splits(vocabulary: int) -> None:
    value = {}
    for split in ("train", "validation", "test"):
        for inputs, targets in rows("memorization", 199, split, seed=3, vocabulary=vocabulary):
            assert inputs[1::2] == [vocabulary - 1] * 16 and targets[::2] == [IGNORE] * 16
            for key, target in zip(inputs[::2], targets[1::2], strict=True):
                assert key < (vocabulary - 1) // 2 <= target < vocabulary - 1
                assert value.setdefault(key, target) == target
    assert len(value) == len({*value.values()}) == (vocabulary - 1) // 2
    assert value_of_key(vocabulary, 3).tolist() == [value[key] for key in range(len(value))]
    assert value_of_key(vocabulary, 4).tolist() != value_of_key(vocabulary, 3).tolist()


@pytest.mark.parametrize(("vocabulary", "share"), [(2048, 0.982), (4096, 0.865), (8192, 0.632)])
def test_memorization_is_capped_where_training_does_not_show_all_keys(vocabulary: int, share: float) -> None:
    seen = {key for inputs, _ in rows("memorization", 256, "train", vocabulary=vocabulary) for key in inputs[::2]}
    assert len(seen) / ((vocabulary - 1) // 2) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("compression", 32),
        ("fuzzy-recall", 4.38),  # 4.5 in a few hundred sequences of the original
        ("recall", 64 - 8 * (1 - (7 / 8) ** 63)),  # 56.0: pairs without the first of each key
        ("memorization", 16),
        ("noisy-recall", 1 + 62 * 0.8 + 1 - 8 * (1 - 7 / 8 * 0.9**62)),  # 43.6, with one slot that is no noise
        ("selective-copying", 16),
    ],
)
def test_as_many_tokens_are_scored_as_expected(task: str, expected: float) -> None:
    scored = (sample(task, 8000, "test")[1] != IGNORE).sum(1)
    assert abs(scored.mean() - expected) <= 4 * scored.std() / 8000**0.5 + 1e-9


@pytest.mark.parametrize("task", TASKS)
def test_guessing_among_the_answers_scores_chance(task: str) -> None:
    """Macro accuracy: the mean over tokens of how often a guess is right where that token is the target."""
    for parameters in ({}, {"vocabulary": 37}):
        _, targets = sample(task, 4000, "test", **parameters)
        columns = targets[:, -1:] if task == "compression" else targets[:, :0]
        answers = np.setdiff1d(targets, [IGNORE, *columns[:1].ravel()])
        guesses = np.random.default_rng(0).choice(answers, targets.shape)
        if task == "compression":
            guesses[:, -1] = targets[:, -1]
        right = [np.mean(guesses[targets == token] == token) for token in np.setdiff1d(targets, [IGNORE])]
        assert np.mean(right) == pytest.approx(TASKS[task].chance(**parameters), rel=0.07)


def frequencies(values: list, outcomes: list) -> None:
    """Every outcome, and no other, as often as the others: within five standard errors."""
    counts = Counter(values)
    assert {*counts} == {*outcomes}
    mean = len(values) / len(outcomes)
    assert all(abs(counts[outcome] - mean) < 5 * mean**0.5 for outcome in outcomes)


def test_tokens_are_uniform() -> None:
    frequencies(sample("compression", 2000)[0][:, :-1].ravel().tolist(), range(15))
    content = sample("selective-copying", 1000)[1][:, -16:]
    frequencies(content.ravel().tolist(), range(14))
    frequencies(sample("memorization", 2000, vocabulary=23)[0][:, ::2].ravel().tolist(), range(11))
    inputs, _ = sample("recall", 6000, length=4)
    frequencies(
        [tuple(row) for row in inputs[:, :2].tolist()], [(key, value) for key in range(8) for value in range(8, 16)]
    )
    noise = sample("noisy-recall", 2000)[0]
    frequencies(noise[noise >= 16].tolist(), range(16, 32))


def test_the_last_key_is_uniform_over_distinct_keys_and_not_over_slots() -> None:
    once = []
    for inputs, _ in rows("recall", 8000, vocabulary=4, length=14):
        counts = Counter(inputs[:-1:2])
        if 1 in counts.values():
            once.append(counts[inputs[-1]] == 1)
    assert np.mean(once) == pytest.approx(1 / 2, abs=0.04)  # 1 in 6 over slots


def test_one_slot_of_noisy_recall_is_never_noise() -> None:
    inputs, _ = sample("noisy-recall", 8000, length=12, noise=0.9)
    noisy = inputs[:, :-1:2] >= 16
    assert not noisy.all(1).any()
    np.testing.assert_allclose(noisy.mean(0), 0.9 * 4 / 5, atol=0.02)  # protected: any of the five slots


def test_motifs_are_ordered_tuples_of_distinct_tokens_all_equally_likely() -> None:
    pairs = [fuzzy_pairs(*row, 8)[0] for row in rows("fuzzy-recall", 6000, "train", vocabulary=8, length=61)]
    for size in (1, 2, 3):
        for part, vocabulary in ((0, range(3)), (1, range(3, 7))):
            motifs = [pair[part] for pair in pairs if len(pair[part]) == size]
            assert len(motifs) / len(pairs) == pytest.approx(1 / 3, abs=0.03)
            frequencies(motifs, [*permutations(vocabulary, size)])


def test_the_probe_of_fuzzy_recall_comes_before_the_first_pair_at_its_place_or_later() -> None:
    """Pairs of two tokens begin at 0, 2, ..., 10, places are 0, 1, ..., 11: one for the first, two for the others."""
    rows_of_pairs = [fuzzy_pairs(*row, 2001) for row in rows("fuzzy-recall", 6000, vocabulary=2001, length=16, motif=1)]
    found = [at for pairs in rows_of_pairs for at, (key, _) in enumerate(pairs[:-1]) if key == pairs[-1][0]]
    np.testing.assert_allclose(np.bincount(found) / 6000, np.array([1, 2, 2, 2, 2, 2]) / 12, atol=0.02)


def test_blanks_are_spread_evenly_before_the_content() -> None:
    inputs, _ = sample("selective-copying", 4000, length=64, copies=5)
    where = np.argsort(inputs[:, :58] == 14, axis=1, kind="stable")[:, :5]
    before = np.diff(where, axis=1, prepend=-1) - 1
    np.testing.assert_allclose(before.mean(0), 53 / 5, atol=0.25)
    np.testing.assert_allclose(before.var(0), 53 * 0.2 * 0.8, rtol=0.12)  # binomial


@pytest.mark.parametrize("task", TASKS)
def test_data_is_decided_by_task_split_seed_and_all_parameters(task: str) -> None:
    draws = [sample(task, 7), sample(task, 7, "validation"), sample(task, 7, "test"), sample(task, 7, seed=1)]
    draws += [sample(task, 7, **{name: values[0]}) for name, values in TASKS[task].sweeps.items()]
    assert len({inputs.tobytes() for inputs, _ in draws}) == len(draws)
    defaults = TASKS[task].defaults
    for again in (sample(task, 7), sample(task, np.int64(7), "train", 0, **defaults)):
        assert all((one == other).all() for one, other in zip(draws[0], again, strict=True))


def test_no_sequence_is_drawn_twice() -> None:
    assert len(np.unique(sample("compression", 2100)[0], axis=0)) == 2100


def test_data_is_the_same_in_every_process() -> None:
    assert sample("compression", 1, length=13)[0].tolist() == [[4, 10, 8, 0, 6, 8, 10, 4, 0, 6, 8, 2, 15]]


@pytest.mark.parametrize("task", TASKS)
def test_settings_vary_one_parameter_at_a_time(task: str) -> None:
    settings = TASKS[task].settings()
    assert settings[0] == TASKS[task].defaults
    for setting in settings[1:]:
        assert sum(setting[name] != default for name, default in settings[0].items()) == 1
    for setting in settings:
        inputs, targets = sample(task, 0, **setting)
        assert inputs.shape == targets.shape == (0, inputs.shape[1]) and inputs.dtype == np.int64
    if task == "fuzzy-recall":
        inputs, _ = sample(task, 3, vocabulary=128, length=1024)
        assert inputs.shape == (3, 1024)


def test_the_sweeps_have_66_settings() -> None:
    assert [len(task.settings()) for task in TASKS.values()] == [11, 11, 11, 6, 14, 13]


@pytest.mark.parametrize(
    ("task", "given", "message"),
    [
        ("recal", {}, "task='recal' is not allowed; choose one of compression, fuzzy-recall, recall, memorization"),
        ("recall", {"noise": 0.2}, "parameter='noise' is not allowed; choose one of vocabulary, length, train, single"),
        ("recall", {"split": "dev"}, "split='dev' is not allowed; choose one of train, validation, test"),
        ("recall", {"n": -1}, "n=-1 is not allowed; choose a whole number"),
        ("recall", {"n": 1.0}, "n=1.0 is not allowed"),
        ("recall", {"seed": -1}, "seed=-1 is not allowed"),
        ("recall", {"train": 0}, "train=0 is not allowed"),
        ("recall", {"single_query": 1}, "single_query=1 is not allowed; choose True or False"),
        ("recall", {"vocabulary": True}, "vocabulary=True is not allowed"),
        ("recall", {"vocabulary": 3}, "vocabulary=3 is not allowed; choose 4 or more"),
        ("recall", {"length": 2}, "length=2 is not allowed; choose an even number of 4 or more"),
        ("recall", {"length": 127}, "length=127 is not allowed; choose an even number"),
        ("noisy-recall", {"vocabulary": 19}, "vocabulary=19 is not allowed; choose 20 or more"),
        ("noisy-recall", {"noise": 1.0}, "noise=1.0 is not allowed"),
        ("noisy-recall", {"noise": float("nan")}, "noise=nan is not allowed"),
        ("noisy-recall", {"noise": "much"}, "noise='much' is not allowed; choose a number"),
        ("noisy-recall", {"noise_vocabulary": 0}, "noise_vocabulary=0 is not allowed; choose 1 or more for noise=0.2"),
        ("fuzzy-recall", {"vocabulary": 6}, "vocabulary=6 is not allowed; choose 7 or more for motif=3"),
        ("fuzzy-recall", {"length": 12}, "length=12 is not allowed; choose 13 or more for motif=3"),
        ("fuzzy-recall", {"motif": 0}, "motif=0 is not allowed"),
        ("fuzzy-recall", {"motif": 40, "vocabulary": 99, "length": 999}, "motif=40 is not allowed"),
        ("selective-copying", {"length": 33}, "length=33 is not allowed; choose 34 or more for copies=16"),
        ("selective-copying", {"copies": 0}, "copies=0 is not allowed"),
        ("selective-copying", {"vocabulary": 3}, "vocabulary=3 is not allowed"),
        ("compression", {"vocabulary": 2}, "vocabulary=2 is not allowed"),
        ("compression", {"length": 1}, "length=1 is not allowed"),
        ("memorization", {"vocabulary": 4}, "vocabulary=4 is not allowed"),
        ("memorization", {"length": 31}, "length=31 is not allowed; choose an even number"),
    ],
)
def test_wrong_input_is_named_with_what_is_allowed(task: str, given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sample(task, **{"n": 1, **given})


@pytest.mark.parametrize(
    ("task", "parameters"),
    [
        ("compression", {"vocabulary": 3, "length": 2}),
        ("fuzzy-recall", {"vocabulary": 7, "length": 13}),
        ("fuzzy-recall", {"vocabulary": 5, "length": 5, "motif": 1}),
        ("recall", {"vocabulary": 4, "length": 4}),
        ("memorization", {"vocabulary": 5, "length": 2}),
        ("noisy-recall", {"vocabulary": 5, "length": 4, "noise_vocabulary": 1, "noise": 0.999}),
        ("selective-copying", {"vocabulary": 4, "length": 4, "copies": 1}),
    ],
)
def test_the_smallest_tasks_work(task: str, parameters: dict) -> None:
    for split in ("train", "test"):
        inputs, targets = sample(task, 257, split, **parameters)
        assert 0 <= inputs.min() <= inputs.max() < parameters["vocabulary"]
        assert (targets[:, -1] >= 0).all() and targets.max() < parameters["vocabulary"]

"""`femixer eval` and `femixer lm table`: likelihoods, tasks from files, resuming, the paper's suite."""

import json
import shutil
import socket
from pathlib import Path

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from small_models import of_bytes, saved

from femixer.cli import main
from femixer.tasks.lm import harness
from femixer.tasks.lm.harness import COLUMNS, EXAMPLES, SUITES, Catalog, Request
from femixer.tasks.lm.model import load

FACTS = json.loads((EXAMPLES / "facts.json").read_text())


def tiny(seed=0):
    return of_bytes(seed, max_position_embeddings=211)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tiny(), tmp_path_factory.mktemp("run") / "model")


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No connection at all, and no cache of somebody else."""

    def refuse(*args):
        raise AssertionError("a test wants to use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def run(checkpoint, out, *args):
    return main(["eval", str(checkpoint), "--out", str(out), *map(str, args)])


def results(out):
    return json.loads((out / "results.json").read_text())


def log_probability(model, context, continuation):
    """log p(continuation | context) in float64, byte by byte from the logits."""
    tokens = torch.tensor([list((context + continuation).encode())])
    with torch.no_grad():
        logits = model(tokens).logits[0].double()
    rows = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    return rows[len(context.encode()) - 1 :].sum().item()


# Likelihoods


def test_likelihoods_are_those_of_the_logits_at_any_batch_size(checkpoint):
    pairs = [("Q: two and two?\nA:", " four"), ("One", " é"), ("A much longer beginning of a text,", " and its end. ")]
    pairs += [(context + " More.", continuation + "x" * at) for at, (context, continuation) in enumerate(pairs, 1)]
    model, tokenizer = load(checkpoint)
    exact = model.to(torch.float64)
    expected = [log_probability(exact, *pair) for pair in pairs]
    model, tokenizer = load(checkpoint)
    for batch in (1, 4):
        lm = harness.language_model(model, tokenizer, batch, None)
        requests = [Instance("loglikelihood", {}, pair, at) for at, pair in enumerate(pairs)]
        with harness.bars(False):
            measured = [value for value, _ in lm.loglikelihood(requests)]
        assert measured == pytest.approx(expected, rel=2e-6)
    assert max(expected) - min(expected) > 10  # they differ by more than any of this


def test_batches_of_prompts_generate_what_each_prompt_does_alone(checkpoint):
    model, tokenizer = load(checkpoint)
    prompts = ["To", "A longer beginning", "Q: why?\nA:", "é", "nothing"]
    options = {"until": ["\n"], "max_gen_toks": 13, "do_sample": False}
    texts = []
    for batch in (1, 5):
        lm = harness.language_model(model, tokenizer, batch, None)
        requests = [Instance("generate_until", {}, (prompt, options), at) for at, prompt in enumerate(prompts)]
        with harness.bars(False):
            texts.append(lm.generate_until(requests))
    assert texts[0] == texts[1] and len(set(texts[0])) > 2


# Tasks


def test_the_example_gives_the_accuracy_of_a_plain_computation(checkpoint, tmp_path, capfd):
    assert run(checkpoint, tmp_path / "out", "--tasks", "femixer_example", "--batch-size", 3) == 0
    model, _ = load(checkpoint)
    right, right_per_byte = 0, 0
    for fact in FACTS:
        scores = [log_probability(model, f"Question: {fact['question']}\nAnswer:", f" {c}") for c in fact["choices"]]
        per_byte = [score / len(choice) for score, choice in zip(scores, fact["choices"], strict=True)]
        right += scores.index(max(scores)) == fact["answer"]
        right_per_byte += per_byte.index(max(per_byte)) == fact["answer"]
    tasks = results(tmp_path / "out")["tasks"]
    metrics = tasks["femixer_facts"]["metrics"]
    assert metrics["acc"]["value"] == pytest.approx(right / len(FACTS))
    assert metrics["acc_norm"]["value"] == pytest.approx(right_per_byte / len(FACTS))
    texts = [doc["text"] for doc in json.loads((EXAMPLES / "prose.json").read_text())]
    # a text begins after the end of another; each fits into the context
    total = sum(_rolling(model, text) for text in texts)
    bits = -total / torch.log(torch.tensor(2.0)).item() / sum(len(text.encode()) for text in texts)
    assert tasks["femixer_prose"]["metrics"]["bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-5)
    shown = capfd.readouterr()
    assert "| femixer_facts | 0 | 17 | acc ↑ |" in shown.out and "[1/2] femixer_facts\n" in shown.err
    assert "it/s" not in shown.err  # no bars in a file


def _rolling(model, text):
    tokens = torch.tensor([[256, *text.encode()]])
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None]).sum().item()


def test_the_example_has_answers_of_its_own_for_each_choice():
    for fact in FACTS:
        assert len(set(fact["choices"])) == 4 and 0 <= fact["answer"] < 4
    assert {fact["answer"] for fact in FACTS} == {0, 1, 2, 3}


def local_tasks(folder):
    """Two tasks of 3 and 5 questions with their data beside them, and a group of both."""
    folder.mkdir()
    for name, facts in (("few", FACTS[:3]), ("more", FACTS[3:8])):
        (folder / f"{name}.json").write_text(json.dumps(facts))
        (folder / f"{name}.yaml").write_text(
            (EXAMPLES / "femixer_facts.yaml").read_text().replace("femixer_facts", f"my_{name}")
            .replace("facts_shots.json", f"{name}.json").replace("facts.json", f"{name}.json")
            .replace("tag: femixer_example\n", "")
        )  # fmt: skip
    (folder / "both.yaml").write_text(
        "group: my_both\ntask: [my_few, my_more]\n"
        "aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]\n"
    )
    return folder


def test_a_group_of_local_tasks_is_the_mean_over_their_samples(checkpoint, tmp_path, monkeypatch):
    folder = local_tasks(tmp_path / "tasks")
    monkeypatch.chdir(tmp_path)  # data is found beside the YAML file, wherever the command runs
    assert run(checkpoint, tmp_path / "out", "--tasks", "my_both", "--include-path", folder, "--shots", 2) == 0
    group = results(tmp_path / "out")["tasks"]["my_both"]
    few, more = (group["tasks"][name] for name in ("my_few", "my_more"))
    assert (few["samples"], more["samples"], group["samples"], group["shots"]) == (3, 5, 8, 2)
    value, three, five = (task["metrics"]["acc"]["value"] for task in (group, few, more))
    assert value == pytest.approx((3 * three + 5 * five) / 8)
    assert "| – my_few | 2 | 3 | acc ↑ |" in (tmp_path / "out" / "table.md").read_text()


def test_shots_are_put_before_the_question(checkpoint):
    catalog = Catalog((), ["femixer_facts"])
    texts = []
    for shots in (None, 2):
        tasks, group = catalog.load(Request("femixer_facts", shots))
        task = tasks["femixer_facts"]
        assert group is None
        task.build_all_requests(limit=1, rank=0, world_size=1)
        texts.append(task.instances[0].args[0])
    own = f"Question: {FACTS[0]['question']}\nAnswer:"
    first, second, *_ = json.loads((EXAMPLES / "facts_shots.json").read_text())
    shots = [f"Question: {doc['question']}\nAnswer: {doc['choices'][doc['answer']]}" for doc in (first, second)]
    assert texts == [own, "\n\n".join([*shots, own])]


def test_a_limit_takes_the_first_samples_and_is_told(checkpoint, tmp_path):
    assert run(checkpoint, tmp_path / "out", "--tasks", "femixer_facts", "--limit", 5) == 0
    assert results(tmp_path / "out")["tasks"]["femixer_facts"]["samples"] == 5
    assert "Only a part of each task (--limit 5)" in (tmp_path / "out" / "table.md").read_text()


# Resuming


def without_evaluation(monkeypatch):
    def refuse(*args):
        raise AssertionError("evaluated again")

    monkeypatch.setattr(harness, "evaluate", refuse)


def test_a_finished_evaluation_is_shown_again_and_not_repeated(checkpoint, tmp_path, monkeypatch, capsys):
    assert run(checkpoint, tmp_path / "out", "--tasks", "femixer_facts") == 0
    table = (tmp_path / "out" / "table.md").read_text()
    without_evaluation(monkeypatch)
    assert run(checkpoint, tmp_path / "out", "--tasks", "femixer_facts") == 2
    assert "--resume" in capsys.readouterr().err
    assert run(checkpoint, tmp_path / "out", "--tasks", "femixer_facts", "--resume") == 0
    assert (tmp_path / "out" / "table.md").read_text() == table
    assert table in capsys.readouterr().out


def test_an_interruption_loses_only_the_running_task(checkpoint, tmp_path, monkeypatch, capsys):
    folder, out = local_tasks(tmp_path / "tasks"), tmp_path / "out"
    options = ["--tasks", "my_both", "femixer_prose", "--include-path", folder]
    assert run(checkpoint, tmp_path / "whole", *options) == 0
    evaluate, done = harness.evaluate, []

    def interrupted(lm, name, task, limit):
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(name)
        return evaluate(lm, name, task, limit)

    monkeypatch.setattr(harness, "evaluate", interrupted)
    assert run(checkpoint, out, *options) == 130
    assert "stopped with 0 of 2 finished, which are kept; continue with: femixer eval" in capsys.readouterr().err
    assert done == ["my_few"] and not (out / "table.md").exists()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"request": "my_both", "task": "my_mo')  # what kill -9 may leave
    done.clear()
    monkeypatch.setattr(harness, "evaluate", lambda *args: done.append(args[1]) or evaluate(*args))
    assert run(checkpoint, out, *options, "--resume") == 0
    assert done == ["my_more", "femixer_prose"]
    assert results(out) == results(tmp_path / "whole")


def test_more_tasks_can_be_added_to_a_folder(checkpoint, tmp_path, monkeypatch):
    assert run(checkpoint, tmp_path / "out", "--tasks", "femixer_facts") == 0
    evaluate, done = harness.evaluate, []
    monkeypatch.setattr(harness, "evaluate", lambda *args: done.append(args[1]) or evaluate(*args))
    assert run(checkpoint, tmp_path / "out", "--tasks", "femixer_prose", "--resume") == 0
    assert done == ["femixer_prose"]
    assert [*results(tmp_path / "out")["tasks"]] == ["femixer_prose", "femixer_facts"]
    assert run(checkpoint, tmp_path / "out", "--tasks", "femixer_facts", "--shots", 3, "--resume") == 0
    assert done == ["femixer_prose", "femixer_facts"]  # other shots are another task
    assert [task["shots"] for task in results(tmp_path / "out")["tasks"].values()] == [3, 0]


def test_results_of_another_model_are_not_resumed(checkpoint, tmp_path, monkeypatch, capsys):
    copy = shutil.copytree(checkpoint, tmp_path / checkpoint.parent.name)
    assert run(copy, tmp_path / "out", "--tasks", "femixer_facts", "--limit", 3) == 0
    tiny(seed=1).save_pretrained(copy)
    without_evaluation(monkeypatch)
    assert run(copy, tmp_path / "out", "--tasks", "femixer_facts", "--limit", 3, "--resume") == 2
    assert "fingerprint was" in capsys.readouterr().err


def test_a_task_that_fails_does_not_stop_the_others(checkpoint, tmp_path, capsys):
    folder, out = local_tasks(tmp_path / "tasks"), tmp_path / "out"
    (folder / "few.json").unlink()
    options = ["--tasks", "my_few", "my_more", "--include-path", folder]
    assert run(checkpoint, out, *options) == 1
    error = capsys.readouterr().err
    assert "[1/2] my_few\n    failed: FileNotFoundError: " in error
    assert "1 of 2 failed (my_few); --resume tries them again" in error
    assert [*results(out)["tasks"]] == ["my_more"]
    (folder / "few.json").write_text(json.dumps(FACTS[:3]))
    assert run(checkpoint, out, *options, "--resume") == 0
    assert [*results(out)["tasks"]] == ["my_few", "my_more"]


def test_a_context_too_short_for_what_a_task_generates_is_told_before_it_starts(checkpoint, tmp_path, capsys):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "doc.json").write_text(json.dumps([{"q": "one", "a": "two"}] * 3))
    (folder / "write.yaml").write_text(
        "task: my_write\ndataset_path: json\ndataset_kwargs: {data_files: {test: doc.json}}\n"
        "output_type: generate_until\ntest_split: test\ndoc_to_text: q\ndoc_to_target: a\n"
        "generation_kwargs: {until: [x], max_gen_toks: 211}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    options = ["--tasks", "my_write", "--include-path", folder]
    assert run(checkpoint, tmp_path / "out", *options) == 1
    assert "max_length=211 is not allowed; choose more than 211" in capsys.readouterr().err
    assert run(checkpoint, tmp_path / "long", *options, "--max-length", 301) == 0
    assert results(tmp_path / "long")["tasks"]["my_write"]["metrics"]["exact_match"]["value"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "tasks=() is not allowed; choose some --tasks or a --suite"),
        (["--suite", "papers"], "suite='papers' is not allowed; choose one of paper"),
        (["--suite", "paper", "--shots", "3"], "shots=3 is not allowed"),
        (["--tasks", "femixer_facts", "--limit", "1.5"], "limit=1.5 is not allowed"),
        (["--tasks", "femixer_facts", "--limit", "0"], "limit=0.0 is not allowed"),
        (["--tasks", "femixer_facts", "--batch-size", "0"], "batch_size=0 is not allowed"),
        (["--tasks", "femixer_facts", "--include-path", "nowhere"], "include_path='nowhere' is not allowed"),
        (["--tasks", "femixer_facts", "--device", "warp"], "device='warp' cannot be used here"),
        (["--tasks", "femixer_facts", "--resume", "--overwrite"], "choose either --resume or --overwrite"),
    ],
)
def test_a_wrong_option_is_one_line(checkpoint, tmp_path, options, message, capsys):
    assert run(checkpoint, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


# The paper's suite


def harness_tasks():
    """The index of those of the harness' folders that the suite needs: all of them would take 15 seconds."""
    root = Path(lm_eval.__file__).parent / "tasks"
    names = "leaderboard arc hellaswag piqa super_glue/boolq super_glue/copa winogrande openbookqa sciq"
    manager = TaskManager(include_path=[root / name for name in names.split()], include_defaults=False)
    return manager.task_index


def test_the_suite_names_tasks_metrics_and_shots_that_the_harness_has():
    index = harness_tasks()
    for column in COLUMNS:
        config = index[column.task].cfg
        listed = config.get("metric_list") or config["aggregate_metric_list"]
        assert column.metric in [metric["metric"] for metric in listed], column
        members = [index[name].cfg for name in config["task"]] if isinstance(config["task"], list) else [config]
        assert {member.get("num_fewshot") or 0 for member in members} == {column.shots}, column


def test_an_unknown_task_is_an_error_with_names_like_it():
    root = Path(lm_eval.__file__).parent / "tasks"
    catalog = Catalog([root / "hellaswag", root / "arc"], ["hellaswag"])
    assert catalog.requests({"ai2_arc": None, "hellaswag": 3}) == [
        Request("arc_challenge"), Request("arc_easy"), Request("hellaswag", 3)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="tasks='helaswag' is unknown; did you mean hellaswag"):
        catalog.requests({"helaswag": None})


def test_the_suite_has_the_shots_of_the_paper():
    suite = SUITES["paper"]
    assert len(suite) == 15
    assert {task: shots for task, shots in suite.items() if shots} == {
        "leaderboard_mmlu_pro": 5,
        "leaderboard_bbh": 3,
        "leaderboard_math_hard": 4,
    }


def test_eval_results_go_straight_into_the_table(checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path / "out", "--tasks", "femixer_facts") == 0
    table = ["lm", "table", f"name={tmp_path / 'out'}", "--out", str(tmp_path / "table")]
    assert main(table) == 2  # a table without one number says nothing
    assert "at least one task of the paper's table (leaderboard_mmlu_pro" in capsys.readouterr().err
    file = tmp_path / "out" / "results.json"
    results, column = json.loads(file.read_text()), COLUMNS[0]
    own = results["tasks"]["femixer_facts"]
    metrics = {column.metric: next(iter(own["metrics"].values()))}
    results["tasks"][column.task] = {**own, "shots": column.shots, "metrics": metrics}
    file.write_text(json.dumps(results))
    assert main(table) == 0
    assert "\n| name | " in capsys.readouterr().out

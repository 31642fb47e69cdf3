"""`femixer generate`: the text it streams, and the checkpoints it takes and refuses."""

import io
import json
import os
import re
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import of_bytes as tiny
from small_models import saved
from transformers import LlamaConfig, LlamaForCausalLM

from femixer.cli import main
from femixer.surgery import upgrade
from femixer.tasks.lm import generate as command
from femixer.tasks.lm import generate as prompts
from femixer.tasks.lm.data import sources
from femixer.tasks.lm.data.tokenizer import byte_tokenizer
from femixer.tasks.lm.generate import UNFINISHED, TextStream
from femixer.tasks.lm.model import Placement, fingerprint, load
from femixer.training.results import model_folder, name_of

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tiny(), tmp_path_factory.mktemp("run") / "model")


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


def run(*args):
    return main(["generate", *map(str, args)])


def continuation(checkpoint, prompt, **options):
    """What transformers itself generates."""
    model, tokenizer = load(checkpoint)
    ids = tokenizer(prompt, return_tensors="pt")
    options = {"do_sample": False, "pad_token_id": END, "eos_token_id": END, **options}
    return model.generate(**ids, **options)[0, ids.input_ids.shape[1] :].tolist()


def stream(tokens, prompt="hé "):
    """The pieces that a stream shows, and after how many tokens each."""
    pieces, seen = [], []
    streamer = TextStream(TOKENIZER, lambda text: pieces.append((len(seen), text)))
    streamer.put(torch.tensor([TOKENIZER(prompt)["input_ids"]]))
    for token in tokens:
        seen.append(token)
        streamer.put(torch.tensor([token]))
    streamer.end()
    return pieces


@given(st.lists(st.one_of(st.text(min_size=1).map(str.encode), st.binary(min_size=1)), max_size=7).map(b"".join))
def test_the_pieces_of_a_stream_put_together_are_the_decoded_text(content):
    tokens = list(content)
    assert "".join(text for _, text in stream(tokens)) == TOKENIZER.decode(tokens)


@given(st.text(alphabet=st.characters(exclude_characters=UNFINISHED, exclude_categories=["Cs"])))
def test_a_character_is_shown_whole_as_soon_as_its_last_byte_is_there(text):
    pieces = stream(list(text.encode()))
    ends = [len(text[: at + 1].encode()) for at in range(len(text))]
    assert pieces == list(zip(ends, text, strict=True))


def test_bytes_that_become_no_character_are_shown_three_tokens_later():
    assert stream([0xFF] * 9) == [*((at, UNFINISHED) for at in range(4, 10)), (9, 3 * UNFINISHED)]


def test_a_token_that_only_means_a_space_beside_others_keeps_it():
    class Words:
        """Drops the space before the first word, as sentencepiece tokenizers do."""

        def decode(self, tokens, skip_special_tokens):
            return "".join(" " + "abc"[token] for token in tokens).removeprefix(" ")

    shown = []
    streamer = TextStream(Words(), shown.append)
    for tokens in ([[0, 1]], [2], [0], [1]):
        streamer.put(torch.tensor(tokens))
    assert shown == [" c", " a", " b"]


def test_greedy_text_is_that_of_transformers_and_alone_on_standard_output(checkpoint, capfd):
    assert run(checkpoint, "--prompt", "To be", "--max-tokens", 23) == 0
    shown = capfd.readouterr()
    expected = TOKENIZER.decode(continuation(checkpoint, "To be", max_new_tokens=23), skip_special_tokens=True)
    assert len(expected) > 5 and shown.out == expected + "\n"
    first_use = "femixer: compiling kernels"  # what a machine's first run says
    (speed,) = [line for line in shown.err.splitlines() if not line.startswith(first_use)]
    assert speed.startswith("prompt: 5 tokens in ") and "; new: 23 tokens in " in speed
    assert speed.count("tokens/s") == 2


def test_beams_are_those_of_transformers(checkpoint, capfd):
    assert run(checkpoint, "--prompt", "To be", "--max-tokens", 11, "--beams", 3) == 0
    expected = continuation(checkpoint, "To be", max_new_tokens=11, num_beams=3)
    assert expected != continuation(checkpoint, "To be", max_new_tokens=11)
    assert capfd.readouterr().out == TOKENIZER.decode(expected, skip_special_tokens=True) + "\n"


def test_drawing_repeats_with_its_seed_and_obeys_top_k_and_top_p(checkpoint):
    model, tokenizer = load(checkpoint)

    def text(**options):
        pieces = []
        command.generate(model, tokenizer, "To be", command.Sampling(max_tokens=29, **options), pieces.append)
        return "".join(pieces)

    greedy = text()
    assert text(temperature=1.0) == text(temperature=1.0) != text(temperature=1.0, seed=1)
    assert text(temperature=1.0) != greedy
    assert text(temperature=1.0, top_k=1) == greedy == text(temperature=1.0, top_p=1e-6)
    assert text(temperature=1e-6) == greedy


def test_generation_stops_at_the_end_of_the_text_unless_told_otherwise(checkpoint, copy, capfd):
    tokens = continuation(checkpoint, "To be", max_new_tokens=17)
    stop = next(token for token in tokens[3:] if token not in tokens[:3])
    settings = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": stop, "do_sample": True}))
    assert run(copy, "--prompt", "To be", "--max-tokens", 17) == 0
    assert f"new: {tokens.index(stop) + 1} tokens" in capfd.readouterr().err
    assert run(copy, "--prompt", "To be", "--max-tokens", 17, "--ignore-end") == 0
    assert "new: 17 tokens" in capfd.readouterr().err


def test_the_prompt_comes_from_an_option_a_file_or_standard_input(checkpoint, tmp_path, monkeypatch, capfd):
    file = tmp_path / "prompt.txt"
    file.write_text("Ünter\nder\n", encoding="utf-8")
    shown = set()
    for source in (["--prompt", "Ünter\nder"], ["--prompt-file", file], ["--prompt-file", "-"], []):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Ünter\nder\n".encode())))
        assert run(checkpoint, "--max-tokens", 3, "--echo", *source) == 0
        shown.add(capfd.readouterr().out)
    assert len(shown) == 1 and shown.pop().startswith("Ünter\nder")


def test_an_empty_prompt_begins_a_text(checkpoint, capfd):
    assert run(checkpoint, "--prompt", "", "--max-tokens", 5) == 0
    expected = continuation(checkpoint, TOKENIZER.bos_token, max_new_tokens=5)
    assert capfd.readouterr().out == TOKENIZER.decode(expected, skip_special_tokens=True) + "\n"


def test_ctrl_c_keeps_what_there_is(checkpoint, monkeypatch, capfd):
    full, pieces = command.write, []

    def interrupted(text):
        full(text)
        pieces.append(text)
        if len(pieces) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "write", interrupted)
    assert run(checkpoint, "--prompt", "To be", "--max-tokens", 1000) == 130
    shown = capfd.readouterr()
    assert shown.out == "".join(pieces) and shown.out.endswith("\n")
    assert shown.err.startswith("stopped; prompt: 5 tokens")


def test_a_reader_that_closes_the_pipe_ends_it_quietly(checkpoint, monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert run(checkpoint, "--prompt", "To be", "--max-tokens", 3) == 141
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "0"], "max_tokens=0 is not allowed"),
        (["--temperature", "-1"], "temperature=-1.0 is not allowed"),
        (["--top-p", "0.5"], "top_p=0.5 is not allowed; choose a --temperature above 0"),
        (["--top-p", "1.5", "--temperature", "1"], "top_p=1.5 is not allowed"),
        (["--top-k", "0", "--temperature", "1"], "top_k=0 is not allowed"),
        (["--beams", "2", "--temperature", "1"], "beams=2 is not allowed"),
        (["--beams", "1000"], "beams=1000 is not allowed; choose at most 257, the model's vocabulary"),
        (["--prompt-file", "nowhere"], "prompt='x' is not allowed; choose either"),
        (["--prompt", "\ud800"], "is not allowed; choose text that can be written in UTF-8"),
        (["--device", "warp"], "device='warp' cannot be used here"),
        (["--dtype", "int8"], "dtype='int8' is not allowed"),
    ],
)
def test_a_wrong_option_is_one_line(checkpoint, options, message, capsys):
    assert run(checkpoint, "--prompt", "x", *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_checkpoint_is_a_model_folder_or_a_results_folder_with_one(checkpoint):
    assert model_folder(checkpoint) == model_folder(checkpoint.parent) == checkpoint
    assert name_of(checkpoint) == name_of(checkpoint.parent) == checkpoint.parent.name


def pickled(folder):
    torch.save(tiny().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def shortened(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def deeper(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))


BROKEN = {
    "does not exist; choose a model folder or a results folder": shutil.rmtree,
    "has no config.json of a model": lambda folder: (folder / "config.json").unlink(),
    "has not saved a model yet": lambda folder: (folder / "config.json").write_text('{"task": "lm", "experiment": {}}'),
    "has no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "has its weights as a pickle (pytorch_model.bin)": pickled,
    "model.safetensors: SafetensorError": shortened,
    "does not fit its config.json: the weights lack model.layers.2.": deeper,
    "has no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "/copy: ": lambda folder: (folder / "tokenizer.json").write_text("{}"),
    "has a tokenizer of 257 tokens and a model of 251": lambda folder: tiny(vocab_size=251).save_pretrained(folder),
    "has a tokenizer of 257 tokens and a model of 3001": lambda folder: tiny(vocab_size=3001).save_pretrained(folder),
}
"""What a command says -> what was done to the folder. Of half a tokenizer it tells what transformers says."""


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_checkpoint_is_one_line_that_says_what_is_wrong(copy, message, capsys):
    BROKEN[message](copy)
    assert run(copy, "--prompt", "x") == 2
    error = capsys.readouterr().err
    assert message in error and str(copy) in error
    assert error.startswith("error: ") and error.endswith("\n") and error.count("\n") == 1


def test_a_file_is_no_checkpoint(checkpoint, capsys):
    assert run(checkpoint / "model.safetensors", "--prompt", "x") == 2
    assert "is a file; choose a model folder" in capsys.readouterr().err


def test_rows_that_pad_an_embedding_are_allowed(copy):
    tiny(vocab_size=320).save_pretrained(copy)
    load(copy)


def test_a_model_is_loaded_in_the_precision_asked_for(checkpoint):
    assert load(checkpoint)[0].dtype == torch.float32
    assert load(checkpoint, Placement(dtype="bfloat16"))[0].dtype == torch.bfloat16


def test_the_fingerprint_changes_with_weights_and_tokenizer(checkpoint, copy):
    assert fingerprint(copy) == fingerprint(checkpoint)
    tiny(seed=1).save_pretrained(copy)
    assert fingerprint(copy) != fingerprint(checkpoint)


@pytest.fixture
def in_stretches(monkeypatch):
    """Long prompts, in small: stretches of about 64 bytes and pieces of 11 tokens."""
    monkeypatch.setattr(sources, "PIECE", 64)
    monkeypatch.setattr(prompts, "LINE", 8)
    monkeypatch.setattr(prompts, "PIECE", 11)


LONG = "".join(f"{'größer' * (i % 3)} line {i * i}\n" for i in range(40))


def test_a_long_prompt_is_read_in_pieces_to_the_same_continuation(checkpoint, tmp_path, monkeypatch, capsys, request):
    file = tmp_path / "prompt.txt"
    file.write_text(LONG + "the end", encoding="utf-8")
    options = ["--max-tokens", "7", "--ignore-end", "--echo"]
    assert run(checkpoint, "--prompt-file", file, *options) == 0
    whole = capsys.readouterr()
    assert whole.out.startswith(LONG + "the end") and f"prompt: {len(file.read_bytes())} tokens" in whole.err
    request.getfixturevalue("in_stretches")
    seen, body = [], type(load(checkpoint)[0].model)
    forward = body.forward

    def counted(self, input_ids=None, **options):
        seen.append(input_ids.shape[1])
        return forward(self, input_ids, **options)

    monkeypatch.setattr(body, "forward", counted)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    for source in (file, "-"):
        seen.clear()
        assert run(checkpoint, "--prompt-file", source, *options) == 0
        again = capsys.readouterr()
        assert again.out == whole.out and f"prompt: {len(file.read_bytes())} tokens" in again.err
        assert max(seen) == 11 and sum(seen) >= len(file.read_bytes())


def test_an_upgraded_model_reads_a_long_prompt_too(tmp_path, in_stretches, monkeypatch, capsys):
    torch.manual_seed(0)
    sizes = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 28}
    saved(upgrade(LlamaForCausalLM(LlamaConfig(vocab_size=257, eos_token_id=END, **sizes))), tmp_path)
    assert isinstance(load(tmp_path)[0], LlamaForCausalLM)
    (tmp_path / "prompt.txt").write_text(LONG, encoding="utf-8")
    shown = set()
    for piece in (11, 10**6):
        monkeypatch.setattr(prompts, "PIECE", piece)
        assert run(tmp_path, "--prompt-file", tmp_path / "prompt.txt", "--max-tokens", 7, "--ignore-end") == 0
        shown.add(capsys.readouterr().out)
    assert len(shown) == 1


def test_a_prompt_that_cannot_be_remembered_is_refused_after_two_pieces(checkpoint, tmp_path, in_stretches, capsys):
    """A model that keeps every token says at once that a prompt is too long; one with a constant state reads it."""
    (tmp_path / "prompt.txt").write_text(LONG * 5, encoding="utf-8")
    command_line = ["--prompt-file", tmp_path / "prompt.txt", "--max-tokens", 3]
    saved(tiny(prior="gla"), tmp_path / "gla")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "free_bytes", lambda device: 10**5)
        assert run(tmp_path / "gla", *command_line) == 0
        capsys.readouterr()
        assert run(checkpoint, *command_line) == 2
    error = capsys.readouterr().err
    assert "prompt.txt' is not allowed; choose a shorter one, or a model whose memory does not grow" in error
    size = len(LONG.encode()) * 5
    told = int(re.search(r"of about ([\d,]+), and 0.0 GB are free", error)[1].replace(",", ""))
    assert 0.8 * size < told < 1.2 * size and error.count("\n") == 1
    assert run(checkpoint, *command_line, "--beams", 2) == 2
    assert "choose a shorter prompt: a beam search reads it all at once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("folder", None, "prompt_file='{path}' is not allowed; choose a file with text, not a folder"),
        ("bytes.txt", LONG.encode() * 3 + b"\xff", "{path}: not text in UTF-8 (invalid start byte at byte 2118)"),
        ("/proc/self/mem", None, "/proc/self/mem: [Errno 5]"),
        ("missing.txt", None, "No such file or directory: '{path}'"),
    ],
)
def test_a_file_that_is_no_text_is_one_line(checkpoint, tmp_path, in_stretches, capsys, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    elif name == "folder":
        path.mkdir()
    assert run(checkpoint, "--prompt-file", path, "--max-tokens", 3) == 2
    assert message.format(path=path) in capsys.readouterr().err

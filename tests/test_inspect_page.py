"""What `femixer inspect` writes is what the model reads, for every prior, in a page that is complete in itself."""

import base64
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import of_bytes, saved
from torch import nn

from femixer import FreeEnergyMixer, posterior
from femixer.cli import main
from femixer.inspection import Inspection, inspect_model, page, write_page
from femixer.inspection.inspection import Layer
from femixer.priors import PRIORS
from femixer.tasks.lm.data.tokenizer import labels, readable

LENGTH, DIM, HEADS = 11, 24, 3
NASTY = ["</script>", "<!--", "&lt;", '"', "'", "\\", "a⏎", "\\x00", "é", "{{data}}", "\ud800"]


def one_layer(prior: str, parts: str = "CLTG", **options) -> Layer:
    torch.manual_seed(0)
    mixer = FreeEnergyMixer(DIM, HEADS, prior=prior, parts=parts, **options)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.4)
    (layer,) = inspect_model(mixer, torch.randn(1, LENGTH, DIM))
    return layer


class Parsed(HTMLParser):
    """The page as a browser would take it apart."""

    def __init__(self, page: Path | str) -> None:
        """page: its file, or its text."""
        super().__init__(convert_charrefs=True)
        self.scripts: dict[str, str] = {}
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.current: str | None = None
        self.feed(page if isinstance(page, str) else page.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.current = (dict(attributes).get("id") or "program") if tag == "script" else None
        if self.current:
            self.scripts[self.current] = ""

    def handle_endtag(self, tag):
        self.current = None

    def handle_data(self, data):
        if self.current:
            self.scripts[self.current] += data
        else:
            self.text.append(data)


class Decoded:
    """The numbers of one layer of a page, decoded as documented in page.py."""

    def __init__(self, parsed: Parsed, number: int = 0) -> None:
        self.about = json.loads(parsed.scripts["page"])["layers"][number]
        data = base64.b64decode(parsed.scripts[f"layer-{number}"])
        self.arrays = {
            name: np.frombuffer(data[place["offset"] :][: place["bytes"]], place["type"])
            for name, place in self.about["arrays"].items()
        }
        self.shape = (self.about["heads"], self.about["tokens"], self.about["width"])

    def quantity(self, name: str) -> torch.Tensor:
        heads, _, width = self.shape
        low, step = (self.arrays[f"{name}_{part}"].reshape(heads, 1, width) for part in ("low", "step"))
        return torch.from_numpy(low + step.astype(float) * self.arrays[name].reshape(self.shape))

    def weights(self, name: str) -> torch.Tensor:
        """[H, T, T, C]"""
        heads, length, _ = self.shape
        scale = self.about["weights"][name]
        codes = self.arrays[name].astype(float)
        values = np.where(codes > 0, np.exp(scale["floor"] + (codes - 1) * scale["step"]), 0)
        cells = values.reshape(heads, -1, length * (length + 1) // 2 if self.about["causal"] else length**2)
        dense = np.zeros((heads, cells.shape[1], length, length))
        at = np.tril_indices(length) if self.about["causal"] else tuple(np.indices((length, length)).reshape(2, -1))
        dense[:, :, at[0], at[1]] = cells
        return torch.from_numpy(dense).movedim(1, -1)

    @property
    def beta_max(self) -> torch.Tensor:
        return torch.from_numpy(self.arrays["beta_max"].astype(float).reshape(self.shape[0], 1, self.shape[2]))


def written(tmp_path: Path, layers: list[Layer], tokens: list[str] | None = None, **options) -> Parsed:
    path = tmp_path / "inspect.html"
    size = write_page(path, layers, tokens or [str(i) for i in range(LENGTH)], model="m", text="t", **options)
    assert size == path.stat().st_size
    return Parsed(path)


def of_channels(weights: torch.Tensor, channels: list[list[int]]) -> torch.Tensor:
    return torch.stack([w[..., chosen] for w, chosen in zip(weights, channels, strict=True)])


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(("parts", "causal"), [("CLTG", True), ("LG", False), ("", True)])
def test_numbers_of_the_page_give_prior_and_posterior_back(tmp_path, prior, parts, causal):
    layer = one_layer(prior, parts, causal=causal)
    r = layer.inspection
    found = Decoded(written(tmp_path, [layer]))
    assert found.about["causal"] == causal
    for name, error in (("value", 1e-5), ("hidden_beta", 1e-5), ("kl", 1e-5), ("lam", 2e-3), ("gate", 2e-3)):
        expected = getattr(r, name)[0].double()
        spread = (expected.amax(1, keepdim=True) - expected.amin(1, keepdim=True)).clamp(min=1e-2)
        assert ((found.quantity(name) - expected).abs() <= error * spread).all(), name
    p, q = r.prior[0].double(), r.posterior[0].double()
    channels = found.about["channels"]
    assert (channels is None) == (p.dim() == 3)
    if channels is None:
        p = p[..., None]
    else:
        assert [len(chosen) for chosen in channels] == [min(page.STORED_CHANNELS, q.shape[-1])] * HEADS
        p, q = of_channels(p, channels), of_channels(q, channels)
    torch.testing.assert_close(found.weights("prior"), p, rtol=1e-3, atol=1e-12)
    if layer.pairs:
        again = found.weights("posterior")
    else:
        value, beta = found.quantity("value"), found.beta_max.expand(-1, LENGTH, -1)
        if channels is not None:
            value, beta = of_channels(value, channels), of_channels(beta, channels)
        again = posterior(found.weights("prior").expand(-1, -1, -1, value.shape[-1]), value, beta)
    torch.testing.assert_close(again, q, rtol=4e-3, atol=1e-6)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_posteriors_that_the_page_computes_are_pythons(tmp_path):
    cases, job = [], []
    for prior in PRIORS:
        layer = one_layer(prior)
        r, folder = layer.inspection, tmp_path / prior
        folder.mkdir()
        parsed = written(folder, [layer])
        about = json.loads(parsed.scripts["page"])["layers"][0]
        job.append({"about": about, "data": parsed.scripts["layer-0"]})
        head, query = 2, 7
        channel = about["channels"][head][1] if about["channels"] else 1
        p, q, lam = r.prior[0, head, query], r.posterior[0, head, query, :, channel], r.lam[0, head, query, channel]
        p = p if p.dim() == 1 else p[:, channel]
        v, beta = r.value[0, head, :, channel], r.hidden_beta[0, head, query, channel].item()
        hidden = None if layer.pairs else posterior(p[None], v[:, None], beta)[0, :, 0].tolist()
        expected = {"prior": p.tolist(), "max": q.tolist(), "effective": ((1 - lam) * p + lam * q).tolist()}
        cases.append({"at": [head, channel, query], "expected": {**expected, "hidden": hidden}})
    assets = Path(page.__file__).with_name("assets")
    run = """
    const jobs = JSON.parse(require("fs").readFileSync(0, "utf-8"));
    console.log(JSON.stringify(jobs.map(({ about, data, at }) => {
      const reading = new Reading(about, data);
      return Object.fromEntries(["prior", "max", "effective", "hidden"].map((kind) => {
        const weights = reading.weights(kind, ...at);
        return [kind, weights && Array.from(weights)];
      }));
    })));
    """
    given = json.dumps([{**one, "at": case["at"]} for one, case in zip(job, cases, strict=True)])
    program = (assets / "data.js").read_text(encoding="utf-8") + run
    answer = subprocess.run(["node", "-e", program], input=given, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    for prior, got, case in zip(PRIORS, json.loads(answer.stdout), cases, strict=True):
        for kind, expected in case["expected"].items():
            if expected is None:
                assert got[kind] is None
            else:
                np.testing.assert_allclose(got[kind], expected, rtol=5e-3, atol=2e-3, err_msg=f"{prior} {kind}")


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_program_of_the_page_is_javascript(tmp_path):
    program = tmp_path / "page.js"
    program.write_text(written(tmp_path, [one_layer("softmax")]).scripts["program"], encoding="utf-8")
    subprocess.run(["node", "--check", str(program)], check=True)


def test_page_is_complete_in_itself_and_text_cannot_break_out_of_it(tmp_path):
    path, model = tmp_path / "inspect.html", "<b>&{{script}}</title>"
    write_page(path, [one_layer("softmax")], NASTY, model=model, text="</script><img src=x onerror=alert(1)>")
    parsed = Parsed(path)
    shown = json.loads(parsed.scripts["page"])
    assert shown["tokens"] == NASTY and shown["model"] == model and "onerror" in shown["text"]
    assert set(parsed.scripts) == {"page", "layer-0", "program"}
    assert "What <b>&{{script}}</title> reads" in parsed.text
    assert not {"img", "b", "iframe"} & {tag for tag, _ in parsed.tags}
    policy = next(a["content"] for tag, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    for tag, attributes in parsed.tags:
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:,") == "data:,", tag
    assert not [word for word in ("http://", "https://", "url(", "@import", "innerHTML") if word in path.read_text()]


def test_weights_that_do_not_sum_to_one_are_shown_normalized(tmp_path):
    layer = one_layer("mamba", prior_options={"normalize": False})
    assert not layer.normalized
    assert not torch.allclose(layer.inspection.prior.sum(3), torch.ones(()))
    assert (layer.inspection.kl >= -1e-6).all()
    weights = Decoded(written(tmp_path, [layer])).weights("prior")
    torch.testing.assert_close(weights.sum(2), torch.ones_like(weights.sum(2)), rtol=1e-3, atol=0)


def test_chosen_channels_are_stored_where_the_prior_differs_per_channel(tmp_path):
    found = Decoded(written(tmp_path, [one_layer("aft")], channels=[5, 1]))
    assert found.about["channels"] == [[5, 1]] * HEADS
    assert found.weights("prior").shape[-1] == 2


def test_too_large_a_page_is_refused_before_all_layers_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "LARGEST", 0.01)
    layer, taken = one_layer("softmax"), []
    layers = (taken.append(i) or layer for i in range(50))
    with pytest.raises(ValueError, match=r"11 tokens would have about 0 MB.*--max-tokens"):
        written(tmp_path, layers, count=50)
    assert taken == [0]
    with pytest.raises(ValueError, match="tokens has 3 entries"):
        written(tmp_path, [layer], tokens=list("abc"))


# ---- models


def language_model(**options):
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 3, "max_position_embeddings": 64}
    return of_bytes(**sizes, initializer_range=0.02, **options)


def test_every_layer_of_a_hybrid_is_inspected_on_what_it_read():
    model = language_model(prior=["softmax", "aft", "gla"])
    ids = torch.randint(0, 257, (1, 13))
    inputs, outputs = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, FreeEnergyMixer):
            module.register_forward_hook(lambda m, _, y, name=name: outputs.update({name: y}))
            inputs[name] = module
    model.train()
    layers = list(inspect_model(model, ids, use_cache=False))
    assert model.training and not any(m._forward_pre_hooks for m in inputs.values())
    assert [layer.prior for layer in layers] == ["softmax", "aft", "gla"]
    assert [layer.name for layer in layers] == [f"model.layers.{i}.mixer" for i in range(3)]
    for layer in layers:
        mixer, r = inputs[layer.name], layer.inspection
        assert isinstance(r, Inspection)
        y = mixer.out_proj((r.gate * r.read).transpose(1, 2).flatten(-2))
        torch.testing.assert_close(y, outputs[layer.name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(layer.beta_max, mixer.beta_max)


def test_padding_of_the_model_reaches_the_inspection():
    keep = torch.tensor([[0, 0, 1, 1, 1]])
    layer = next(inspect_model(language_model(), torch.randint(0, 257, (1, 5)), attention_mask=keep, use_cache=False))
    assert (layer.inspection.prior[..., :2] == 0).all()


def test_baselines_and_layers_not_chosen_are_listed_with_the_reason(tmp_path):
    model = language_model(mixer=["fem", "attention", "fem"])
    layers = list(inspect_model(model, torch.arange(LENGTH)[None], only=[0, 1], use_cache=False))
    assert [layer.inspection is None for layer in layers] == [False, True, True]
    assert layers[1].prior == "Attention" and "baseline" in layers[1].missing
    assert layers[2].missing == "not chosen"
    parsed = written(tmp_path, layers)
    assert set(parsed.scripts) == {"page", "layer-0", "program"}
    assert [one.get("missing") for one in json.loads(parsed.scripts["page"])["layers"]] == [
        None,
        layers[1].missing,
        "not chosen",
    ]
    with pytest.raises(ValueError, match="no FreeEnergyMixer"):
        inspect_model(language_model(mixer="attention"), torch.arange(3)[None])


# ---- tokens


def test_tokens_are_readable():
    assert readable("a b\n\t\r") == "a␣b⏎⇥␍"
    assert readable("\x00\x1b\x7f\u202e\ufeff") == "\\x00\\x1b\\x7f\\u202e\\ufeff"
    assert readable("") == "∅"
    assert readable('<&"é漢') == '<&"é漢'


def test_bytes_that_are_no_character_are_shown_as_bytes():
    from femixer.tasks.lm.data.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    ids = tokenizer("a é\n")["input_ids"]
    assert labels(tokenizer, [*ids, 0, 255, tokenizer.eos_token_id]) == [
        *("a", "␣", "\\xc3", "\\xa9", "⏎", "\\x00", "\\xff", "<|endoftext|>")
    ]


# ---- the command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    model = language_model(mixer=["fem", "attention", "fem"], prior=["softmax", "softmax", "decay"])
    return saved(model, tmp_path_factory.mktemp("checkpoint") / "small")


def test_command_writes_page_figures_and_table(tmp_path, checkpoint, capsys):
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("He said: $x$ < </script> é\n" + "z" * 50, encoding="utf-8")
    (out / "figures").mkdir(parents=True)
    (out / "figures" / "layer-07-head-00.png").touch()
    (out / "figures" / "mine.png").touch()
    assert main(["inspect", str(checkpoint), "--file", str(text), "--out", str(out), "--max-tokens", "31"]) == 0
    shown, warned = capsys.readouterr()
    assert "The first 31 of 78 tokens" in warned and "inspect.html (0.1 MB)" in shown
    figures = sorted(path.name for path in (out / "figures").iterdir())
    assert [name[:8] for name in figures] == ["layer-00", "layer-02", "mine.png"]
    assert (out / "figures" / figures[0]).read_bytes().startswith(b"\x89PNG")
    rows = (out / "summary.md").read_text(encoding="utf-8").splitlines()[-3:]
    assert [row.split(" | ")[1] for row in rows] == ["softmax", "Attention", "decay"]
    assert "a baseline" in rows[1]
    parsed = Parsed(out / "inspect.html")
    held = json.loads(parsed.scripts["page"])
    assert held["tokens"][:9] == [*"He␣said:␣"] and len(held["tokens"]) == 31
    assert held["text"].startswith("He said: $x$ < </script> é\nzz")
    assert set(parsed.scripts) == {"page", "layer-0", "layer-2", "program"}
    kl = float(rows[2].split(" | ")[6])
    assert kl == pytest.approx(np.mean(held["layers"][2]["means"]["kl"]), abs=1e-3)


def test_the_command_refuses_too_large_a_page_before_any_work_and_keeps_the_old_results(
    tmp_path, checkpoint, monkeypatch, capsys
):
    out = tmp_path / "out"
    command = ["inspect", str(checkpoint), "--out", str(out), "--text"]
    assert main([*command, "abcdefg"]) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(page, "LARGEST", 0.001)
        patch.setattr(nn.Module, "__call__", None)  # not even the model runs
        assert main([*command, "abcdefghijk"]) == 2
    assert "a page of 11 tokens would have about" in capsys.readouterr().err
    monkeypatch.setattr(Inspection, "plot", lambda *args, **options: 1 / 0)
    assert main([*command, "abcdefghijk"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert main([*command, "abc", "--out", str(checkpoint)]) == 2
    assert "a folder of its own: this one holds a run, a store of results or a model" in capsys.readouterr().err


@pytest.mark.parametrize("prior", ["softmax", "aft", "mamba-interactive"])
def test_the_size_that_is_foreseen_is_that_of_the_page(prior, tmp_path):
    torch.manual_seed(0)
    mixer, path, length = FreeEnergyMixer(DIM, HEADS, prior=prior), tmp_path / "page.html", 67
    layers = [*inspect_model(mixer, torch.randn(1, length, DIM))]
    empty = write_page(path, [Layer("m", prior)], ["a"] * length, model="m", text="t")
    size = write_page(path, layers, ["a"] * length, model="m", text="t") - empty
    largest = page.LARGEST
    try:
        page.LARGEST = 1.05 * size / 1e6
        page.check_size([mixer], length)
        page.LARGEST = 0.9 * size / 1e6
        with pytest.raises(ValueError, match="would have about"):
            page.check_size([mixer], length)
    finally:
        page.LARGEST = largest


def test_command_reads_standard_input_and_draws_what_is_chosen(tmp_path, checkpoint, monkeypatch):
    (tmp_path / "in").write_text("abcdefg", encoding="utf-8")
    chosen = ["--layers", "2", "--heads", "0", "2", "--channels", "1", "3", "--query", "4"]
    with (tmp_path / "in").open(encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["inspect", str(checkpoint), "--out", str(tmp_path / "out"), *chosen]) == 0
    figures = sorted(path.name for path in (tmp_path / "out" / "figures").iterdir())
    assert figures == ["layer-02-head-00.png", "layer-02-head-02.png"]
    held = json.loads(Parsed(tmp_path / "out" / "inspect.html").scripts["page"])
    assert held["query"] == 4 and held["layers"][2]["channels"] == [[1, 3]] * HEADS
    assert held["layers"][0]["missing"] == "not chosen"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", ""], "text=''"),
        (["--text", "a", "--file", "b"], "either --text or --file"),
        (["--file", "nowhere.txt"], "nowhere.txt"),
        (["--text", "abc", "--layers", "3"], "numbers below 3"),
        (["--text", "abc", "--layers", "1"], "no baseline"),
        (["--text", "abc", "--heads", "3"], "heads=(3,)"),
        (["--text", "abc", "--channels", "99"], "channels=(99,)"),
        (["--text", "abc", "--query", "3"], "query=3"),
        (["--text", "abc", "--max-tokens", "0"], "max_tokens=0"),
    ],
)
def test_command_refuses_what_is_not_there(tmp_path, checkpoint, options, message, capsys):
    out = tmp_path / "out"
    assert main(["inspect", str(checkpoint), "--out", str(out), *options]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("prior", ["softmax", "mamba-interactive"])
def test_a_notebook_shows_the_page_of_an_inspection(prior):
    frame = one_layer(prior).inspection._repr_html_()
    (attributes,) = [attributes for tag, attributes in Parsed(frame).tags if tag == "iframe"]
    assert {"page", "layer-0"} <= {*Parsed(attributes["srcdoc"]).scripts}
    assert f"a mixer with prior {prior}" in attributes["srcdoc"]


def test_a_page_too_large_for_a_notebook_is_a_line(monkeypatch):
    monkeypatch.setattr(page, "LARGEST_EMBEDDED", 0.01)
    assert one_layer("softmax").inspection._repr_html_().startswith("<p>")

"""Language models behind a server: stop strings, and `transformers serve` as docs/lm.md starts it."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from small_models import of_bytes, saved

from femixer.models import FEMForCausalLM
from femixer.tasks.lm.data.tokenizer import byte_tokenizer

ROOT = Path(__file__).parent.parent
TOKENIZER = byte_tokenizer()


def continued(model: FEMForCausalLM, **options: Any) -> str:
    prompt = TOKENIZER("ab", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=12, do_sample=False, **options)
    return TOKENIZER.decode(written[0, prompt["input_ids"].shape[1] :])


def test_generation_ends_at_stop_strings() -> None:
    model, letters = (
        of_bytes(num_hidden_layers=1),
        {"suppress_tokens": [n for n in range(257) if not TOKENIZER.decode([n]).isalnum()]},
    )
    text = continued(model, **letters)
    stop = next(letter for letter in text[1:] if letter != text[0])
    stopped = continued(model, tokenizer=TOKENIZER, stop_strings=[stop], **letters)
    assert stopped == text[: text.index(stop) + 1] and len(stopped) < len(text)


def post(address: str, **content: Any) -> Any:
    request = urllib.request.Request(
        address, json.dumps(content).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def wait(address: str, server: subprocess.Popen[str], log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.mark.delivery
def test_transformers_serve_answers_what_generate_does(tmp_path: Path) -> None:
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package)
    model = of_bytes(num_hidden_layers=1)
    saved(model, tmp_path / "model")
    (documented,) = re.findall(
        r"^(python -c .*) serve ", (ROOT / "docs/lm.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, *shlex.split(documented)[1:], "serve", str(tmp_path / "model"), "--device", "cpu"]
    command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "FEMIXER_BACKEND": "plain"}
    log, address = tmp_path / "log", f"http://127.0.0.1:{port}"
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file, text=True, env=environment) as server,
    ):
        try:
            wait(f"{address}/health", server, log)
            asked = {"model": str(tmp_path / "model"), "prompt": "ab", "max_tokens": 12, "temperature": 0}
            answer = post(f"{address}/v1/completions", **asked)
        finally:
            server.terminate()
    assert answer["choices"][0]["text"] == continued(model), log.read_text()

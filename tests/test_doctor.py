"""`femixer doctor`: what it tells, and that it finds what is wrong."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from started import python
from torch import Tensor

from femixer import doctor
from femixer.cli import main
from femixer.kernels import check, dispatch
from femixer.kernels.rms_norm import OPERATOR, forward

RMS_NORM = ("-m", "femixer", "doctor", "--operators", "rms_norm")


def test_every_operator_is_right_on_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for name in ("python 3", "torch", "numba", "transformers", "threads", "cpu (", "backend", "rms_norm", "All right"):
        assert name in shown
    assert "wrong" not in shown


def test_every_folder_of_an_operator_is_found() -> None:
    package = Path(doctor.__file__).parent
    pages = package.glob("**/kernels/*/__init__.py")
    folders = [page.parent for page in pages if "OPERATOR" in page.read_text(encoding="utf-8")]
    assert folders
    found = {operator.name for operator in check.find_operators(*doctor.PACKAGES)}
    assert {folder.name for folder in folders} == found


def right(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return forward(x, weight, eps)[0]


@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (lambda x, weight, eps: (right(x, weight, eps) * 2,), "results off by"),
        (lambda x, weight, eps: (right(x, weight.detach(), eps) + 0 * weight,), "gradient of weight off by"),
        (lambda x, weight, eps: (right(x, weight, eps) * torch.nan,), "results off by inf"),
        (lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_wrong_is_named_and_the_exit_code_is_one(
    forward: object, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = SimpleNamespace(forward=forward, DIFFERENTIABLE=True)
    monkeypatch.setitem(OPERATOR.implementations, "plain", broken)
    assert main(["doctor", "--operators", "rms_norm"]) == 1
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith("wrong: "))
    assert line.startswith("wrong: rms_norm on plain (cpu), example 'rows', float32: ") and what in line
    assert "rms_norm on numba" not in shown
    assert " failed" in shown.splitlines()[-1]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels as on a GPU, but interpreted; bfloat16 is wrong there."""
    pytest.importorskip("triton")
    monkeypatch.setattr(doctor, "columns", lambda: [doctor.Column("triton", "cpu")])
    monkeypatch.setattr(doctor, "HALF", (torch.float16,))


def test_what_only_a_gpu_shows_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    on_a_gpu(monkeypatch)
    assert main(["doctor", "--operators", "rms_norm"]) == 0
    shown = capsys.readouterr().out
    assert "Largest errors in half precision" in shown and "float16, triton" in shown and "All right" in shown
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("noise", "what"),
    [
        (lambda y: y + 1e-7 * torch.rand_like(y), "differs from run to run"),
        (lambda y: y + 0 * torch.empty_like(y), "not a number where new memory is"),
    ],
)
def test_races_and_new_memory_are_found(
    noise: Any, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu(monkeypatch)
    broken = SimpleNamespace(forward=lambda *given: (noise(forward(*given)[0]),), DIFFERENTIABLE=True)
    monkeypatch.setitem(OPERATOR.implementations, "triton", broken)
    assert main(["doctor", "--operators", "rms_norm"]) == 1
    assert what in capsys.readouterr().out


def test_kernels_that_fail_in_half_precision_are_told_with_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(doctor, "HALF", (torch.float16, torch.float64))  # one that fails, one that is not served
    served = dispatch.refusal

    def refusal(operator: Any, backend: str, arguments: Any) -> str | None:
        return "too wide" if arguments[0].dtype == torch.float64 else served(operator, backend, arguments)

    def fails(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
        if x.dtype == torch.float16:
            raise RuntimeError("it does not compile")
        return forward(x, weight, eps)

    monkeypatch.setattr(dispatch, "refusal", refusal)
    monkeypatch.setitem(OPERATOR.implementations, "triton", SimpleNamespace(forward=fails, DIFFERENTIABLE=True))
    assert main(["doctor", "--operators", "rms_norm"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "inf" in line and "rms_norm" in line)
    name, half, plain, *others = (cell.strip() for cell in row.replace("│", "|").strip("| ").split("|"))
    assert (name, half) == ("rms_norm", "inf") and float(plain) < 1e-2 and not any(others)


def test_an_operator_that_a_backend_leaves_to_torch_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(OPERATOR.implementations, "numba", None)
    assert main(["doctor", "--operators", "rms_norm"]) == 0
    shown = capsys.readouterr().out
    assert "left to torch" in shown and OPERATOR.left_to_torch in shown


def test_a_backend_that_is_not_there_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dispatch, "CANDIDATES", {})
    monkeypatch.setattr(dispatch, "_numba", "numba is not installed: pip install 'femixer[fast]'")
    assert main(["doctor", "--operators", "rms_norm", "--warm"]) == 0
    shown = capsys.readouterr().out
    assert "Nothing to compile: numba is not installed" in shown
    assert "- numba: numba is not installed" in shown


def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--operators", "sofmax"]) == 2
    assert capsys.readouterr().err.startswith("error: operators='sofmax' is not allowed; choose one of ")
    assert main(["doctor", "--operators", "rms_norm", "--targets", "sm_90"]) == 2
    assert capsys.readouterr().err == "error: targets=('sm_90',) is not allowed; choose --compile with it\n"
    assert main(["doctor", "--known", "compiled.jsonl"]) == 2
    assert capsys.readouterr().err.endswith("is not allowed; choose --compile with it\n")
    assert main(["doctor", "--warm", "--compile", "--operators", "rms_norm"]) == 2
    assert capsys.readouterr().err == "error: warm=True is not allowed; choose either --warm or --compile\n"
    done = python("-m", "femixer", "doctor", FEMIXER_BACKEND="nmba")
    assert done.returncode == 2
    assert done.stderr == "error: FEMIXER_BACKEND='nmba' is unknown; choose one of auto, plain, numba, triton\n"


def test_the_backend_of_the_environment_is_shown() -> None:
    done = python(*RMS_NORM, FEMIXER_BACKEND="plain")
    assert done.returncode == 0, done.stderr
    assert "plain (FEMIXER_BACKEND is set)" in done.stdout


USE = """
import torch
from femixer.kernels.rms_norm import rms_norm
torch.set_num_threads(2)
for rows in (3, 4096):  # on one thread and on several
    x = torch.randn(rows, 64, requires_grad=True)
    rms_norm(x, torch.ones(64, requires_grad=True), 1e-6).sum().backward()
"""


def test_warmed_kernels_are_not_compiled_again(tmp_path: Path) -> None:
    done = python(*RMS_NORM, "--warm", NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "kernels are compiled" in done.stdout
    assert "compiling kernels once" not in done.stderr
    used = python("-c", USE, NUMBA_CACHE_DIR=str(tmp_path))
    assert (used.returncode, used.stderr) == (0, "")

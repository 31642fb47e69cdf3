"""The package as it is installed and imported."""

import subprocess
import sys
from importlib.metadata import entry_points, version

import femixer

HEAVY = ("transformers", "triton", "matplotlib", "tyro", "rich", "numba", "safetensors")


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_version_agrees_with_the_installed_package():
    assert femixer.__version__ == version("femixer")


def test_the_console_script_is_the_command_line():
    (script,) = entry_points(group="console_scripts", name="femixer")
    assert script.value == "femixer.cli:main"


def test_import_loads_no_optional_package():
    code = "import sys, torch; before = set(sys.modules); import femixer; print(*set(sys.modules) - before)"
    loaded = python(code).split()
    assert "femixer" in loaded
    assert not set(HEAVY) & set(loaded)


def test_import_adds_less_than_a_third_of_a_second_to_torch():
    code = "import torch, time; start = time.process_time(); import femixer; print(time.process_time() - start)"
    # Processor time, with two more tries: what is asked is the work done, not how busy the machine is.
    assert any(float(python(code)) < 0.3 for _ in range(3))

"""`motet info` and `motet` itself."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

from typer.testing import CliRunner

from motet.cli.main import app
from motet.kernels.cpu.library import ISA_VARIABLE, usable_isas
from motet.sdk.testing import save_tiny_model


def test_info_describes_the_machine():
    done = CliRunner().invoke(app, ["info"])
    assert done.exit_code == 0
    assert version("torch") in done.output


def test_info_says_which_backend_computes_and_why():
    def backend(**env):
        done = CliRunner().invoke(app, ["info"], env={"COLUMNS": "200", ISA_VARIABLE: None, **env})
        return done.exit_code, done.output

    usable = usable_isas()
    expected = f"cpu ({usable[0]}); usable here: {', '.join(usable)}" if usable else "without a C++ compiler"
    assert expected in backend()[1]
    if usable:
        assert "cpu (portable), as MOTET_CPU_ISA says" in backend(MOTET_CPU_ISA="portable")[1]
    code, output = backend(MOTET_CPU_ISA="avx9000")
    assert code == 1 and "BackendUnavailable: MOTET_CPU_ISA is 'avx9000'" in output


def test_without_a_compiler_the_command_line_warns_once_and_works(tiny_folder):
    program = (
        "import sys, pathlib; from motet.kernels.cpu import library; from motet.cli import main;"
        "library._file = lambda isa: pathlib.Path(sys.argv[-1]) / isa; main()"
    )
    command = [sys.executable, "-c", program, "info", str(tiny_folder)]
    environment = {name: value for name, value in os.environ.items() if name != ISA_VARIABLE}
    environment["COLUMNS"] = "200"
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "backend reference" in done.stdout
    assert done.stderr.count("WARNING: motet was installed without a C++ compiler") == 1
    assert len(done.stderr.splitlines()) == 1


def test_info_describes_a_model(tiny_folder, tiny_model):
    done = CliRunner().invoke(app, ["info", str(tiny_folder)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "LlamaForCausalLM" in done.output
    assert f"{tiny_model.num_parameters():,}" in done.output
    assert "q_proj" in done.output
    assert "dtype auto is float32" in done.output or "without a C++ compiler" in done.output


def test_a_model_that_is_not_there_is_an_error_in_one_line(tmp_path):
    done = CliRunner().invoke(app, ["info", str(tmp_path / "nothing")])
    assert done.exit_code == 1
    assert "ModelNotFound" in done.output
    assert "Traceback" not in done.output


def test_a_name_with_brackets_is_shown_as_it_is(tmp_path):
    folder = save_tiny_model(tmp_path / "a[bold]b[" / "c]")
    done = CliRunner().invoke(app, ["info", str(folder)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "a[bold]b[/c]" in done.output


def test_help_needs_no_torch():
    program = "import sys; from motet.cli import main; sys.argv = ['motet', 'batch', '--help']; main()"
    check = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {program}"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert "IN.jsonl" in done.stdout
    assert done.stdout.strip().endswith("False")


def test_without_its_libraries_the_command_line_says_what_to_install():
    program = "import sys; sys.modules['typer'] = None; from motet.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'motet[cli]'" in done.stderr
    assert "Traceback" not in done.stderr

"""`motet chat` with its lines from a pipe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from motet import Engine
from motet.cli.main import app
from motet.sdk.testing import save_tiny_adapter, save_tiny_model

SMALL = ["--max-tokens", "4", "--set", "kv_cache_bytes=4194304"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def asked(monkeypatch) -> list[list[dict]]:
    """The messages of each call of `Engine.chat`."""
    calls = []
    chat = Engine.chat
    monkeypatch.setattr(
        Engine,
        "chat",
        lambda self, messages, *args, **kw: calls.append(messages) or chat(self, messages, *args, **kw),
    )
    return calls


def talk(model, text: str, *more: str):
    return CliRunner().invoke(app, ["chat", str(model), *SMALL, *more], input=text)


def test_a_conversation_grows_until_it_is_forgotten(model, asked):
    done = talk(model, "first\n\nsecond\n/new\nthird", "--system", "Be brief.")
    assert done.exit_code == 0, done.output
    assert [[m["role"] for m in messages] for messages in asked] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert asked[2][-1]["content"] == "third"


def test_a_question_that_fails_is_not_kept(model, asked):
    done = talk(model, "x" * 1000 + "\nshort\n")
    assert done.exit_code == 0
    assert "PromptTooLong: " in done.output
    assert [len(messages) for messages in asked] == [1, 1]


def test_an_adapter_answers(model, asked, tmp_path):
    folder = save_tiny_adapter(tmp_path / "adapter")
    answers = [talk(model, "Hello\n", *more).output for more in ((), ("--adapter", str(folder)))]
    assert answers[0] != answers[1]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--temperature", "inf"], "InvalidRequest: temperature"),
        (["--adapter", "nowhere"], "AdapterLoadError: "),
    ],
)
def test_what_cannot_begin_says_why_in_one_line(model, more, error):
    done = talk(model, "Hello\n", *more)
    assert done.exit_code == 1
    assert error in done.output
    assert isinstance(done.exception, SystemExit)


@pytest.mark.skipif(os.name != "posix", reason="a terminal to give")
def test_only_a_terminal_is_prompted(model):
    assert ">" not in talk(model, "/new\n\n").output
    ours, theirs = os.openpty()
    os.write(ours, b"/new\n\n\x04")  # Ctrl-D
    program = "from motet.cli import main; main()"
    command = [sys.executable, "-c", program, "chat", str(model), *SMALL]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=60, check=False)
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, done.stdout) == (0, "> > > \n"), done.stderr


@pytest.mark.skipif(os.name != "posix", reason="a shell that closes the input")
def test_without_an_input_it_ends_with_one_line(model):
    program = 'exec "$0" -c "from motet.cli import main; main()" chat "$1" <&-'
    done = subprocess.run(
        ["sh", "-c", program, sys.executable, str(model)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr.startswith("InvalidRequest: the standard input is closed")
        and done.stderr.count("\n") == 1
    )


def test_what_the_terminal_cannot_show_ends_no_answer(model):
    program = "from motet.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "chat", str(model), *SMALL],
        input=b"Hello\nagain\n",
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout

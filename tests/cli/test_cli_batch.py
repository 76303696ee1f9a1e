"""`motet batch`: each line is answered exactly once, whatever happens in between."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from motet import AsyncEngine, EngineDead, InvalidRequest
from motet.cli import batch as cli_batch
from motet.cli.main import app
from motet.runtime.engine_loop import EngineLoop

SMALL = ["--set", "kv_cache_bytes=4194304", "--set", "max_num_seqs=8"]


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch(source: Path, target: Path, model: Path, *more: str):
    return CliRunner().invoke(app, ["batch", str(source), str(target), "--model", str(model), *SMALL, *more])


def request(line_id: object, **more: object) -> dict:
    return {"id": line_id, "prompt": f"line {line_id}", "max_tokens": 4, "ignore_eos": True} | more


def test_every_line_is_answered_with_its_own_parameters_and_adapter(tiny_folder, adapters, tmp_path):
    source = write_lines(
        tmp_path / "in.jsonl",
        request("a"),
        request(1, prompt=[65, 66, 67], max_tokens=2),
        request("1", prompt="ABC", max_tokens=2, adapter="r8", tenant="acme", seed=5, temperature=1.0),
        request("several", n=2, temperature=0.0),
        request("likely", logprobs=1, prompt_logprobs=0),
    )
    done = batch(source, tmp_path / "out.jsonl", tiny_folder, "--adapter", f"r8={adapters['r8']}")
    assert done.exit_code == 0, done.output
    results = {json.dumps(result["id"]): result for result in read_lines(tmp_path / "out.jsonl")}
    assert set(results) == {'"a"', "1", '"1"', '"several"', '"likely"'}
    assert set(results['"a"']) == {"id", "text", "token_ids", "finish_reason", "stop_reason", "usage"}
    assert len(results['"a"']["token_ids"]) == results['"a"']["usage"]["output_tokens"] == 4
    assert results["1"]["usage"]["prompt_tokens"] == 3
    assert results['"1"']["token_ids"] != results["1"]["token_ids"]
    assert [output["index"] for output in results['"several"']["outputs"]] == [0, 1]
    assert len(results['"likely"']["logprobs"]) == 4
    assert results['"likely"']["prompt_logprobs"][0] is None


def test_a_bad_line_is_reported_by_number_and_stops_nothing(tiny_folder, tmp_path):
    source = write_lines(
        tmp_path / "in.jsonl",
        request("good"),
        "{torn",
        "[1]",
        {"prompt": "no id"},
        {"id": "nothing asked"},
        request("good", prompt="a second time"),
        request("unknown", temprature=1.0),
        request("strange", max_tokens="4"),
        request("adapter", adapter="nobody"),
        "",
        request("long", prompt="x" * 10_000),
        request("no template", prompt=None) | {"messages": [{"role": "user", "content": "Hi"}]},
        request("tools", tools=[]),
        request("last"),
    )
    done = batch(source, tmp_path / "out.jsonl", tiny_folder)
    assert done.exit_code == 1
    results = read_lines(tmp_path / "out.jsonl")
    failed = {r.get("id", r.get("line")): r["error"]["message"] for r in results if "error" in r}
    assert {r["id"] for r in results if "error" not in r} == {"good", "last"}
    assert set(failed) == {
        *(2, 3, 4, 6),
        *("nothing asked", "unknown", "strange", "adapter", "long", "no template", "tools"),
    }
    assert "not JSON" in failed[2]
    assert "`id`" in failed[4]
    assert '"good"' in failed[6]
    assert "temprature" in failed["unknown"]
    for number in (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13):
        assert f"line {number}: " in done.output
    assert "failed lines: 2, 3, 4, 5, 6, 7, 8, 9, 11, 12 and 1 more; --retry-failed" in done.output
    again = batch(source, tmp_path / "out.jsonl", tiny_folder)
    assert again.exit_code == 1
    assert again.output == done.output[done.output.index("2 answered, 11 failed: ") :]
    assert read_lines(tmp_path / "out.jsonl") == results


def test_a_finished_batch_needs_no_model(tiny_folder, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", request("a"))
    assert batch(source, tmp_path / "out.jsonl", tiny_folder).exit_code == 0
    assert batch(source, tmp_path / "out.jsonl", tmp_path / "gone").exit_code == 0


def test_a_torn_last_result_is_made_again(tiny_folder, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *(request(i) for i in range(5)))
    target = tmp_path / "out.jsonl"
    assert batch(source, target, tiny_folder).exit_code == 0
    whole = read_lines(target)
    target.write_bytes(target.read_bytes()[:-10])
    assert batch(source, target, tiny_folder).exit_code == 0
    results = read_lines(target)
    assert results[:4] == whole[:4]
    assert {r["id"]: r["token_ids"] for r in results} == {r["id"]: r["token_ids"] for r in whole}


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize(
    "foreign",
    ['{"name": "a diary"}', '{"id": 1, "prompt": "of a batch"}', "not even JSON", "[]", "3", "[" * 100_000],
)
def test_a_file_that_holds_other_things_is_not_touched(tiny_folder, tmp_path, foreign, end):
    source = write_lines(tmp_path / "in.jsonl", request("a"))
    target = tmp_path / "out.jsonl"
    target.write_text(foreign + end)
    done = batch(source, target, tiny_folder)
    assert done.exit_code == 1
    assert "line 1" in done.output
    assert target.read_text() == foreign + end


def test_results_never_go_into_the_file_of_requests_nor_into_what_is_no_file(tiny_folder, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", request("a"))
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    before = source.read_bytes()
    for target in (source, link, Path(os.devnull), tmp_path / "no folder" / "out.jsonl"):
        done = batch(source, target, tiny_folder)
        assert done.exit_code == 1
        assert "InvalidRequest: " in done.output or "FileNotFoundError: " in done.output
    assert source.read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="flock")
def test_a_second_batch_on_the_same_results_is_refused(tiny_folder, tmp_path):
    import fcntl

    source, target = write_lines(tmp_path / "in.jsonl", request("a")), tmp_path / "out.jsonl"
    with target.open("a+b") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        done = batch(source, target, tiny_folder)
    assert done.exit_code == 1
    assert "another `motet batch`" in done.output
    assert batch(source, target, tiny_folder).exit_code == 0


@pytest.mark.skipif(os.name != "posix", reason="a pipe by name")
def test_requests_may_come_from_a_pipe(tiny_folder, tmp_path):
    source = tmp_path / "pipe"
    os.mkfifo(source)
    lines = "".join(json.dumps(request(i)) + "\n" for i in range(3))
    writer = threading.Thread(target=source.write_text, args=(lines,))
    writer.start()
    assert batch(source, tmp_path / "out.jsonl", tiny_folder).exit_code == 0
    writer.join()
    assert sorted(r["id"] for r in read_lines(tmp_path / "out.jsonl")) == [0, 1, 2]


def test_an_adapter_that_was_not_given_is_advised_as_an_option(tiny_folder, adapters, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", request("a", adapter="shop"))
    for more, loaded in ([], "none"), (["--adapter", f"r8={adapters['r8']}", "--retry-failed"], "'r8'"):
        assert batch(source, tmp_path / "out.jsonl", tiny_folder, *more).exit_code == 1
        [result] = read_lines(tmp_path / "out.jsonl")
        advice = f"no adapter 'shop' is loaded: give it by --adapter NAME=PATH (loaded: {loaded})"
        assert result["error"] == {"type": "AdapterNotFound", "message": advice}


def fail_two(tiny_folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(requests, results): of four lines, 2 and 3 have failed; what would answer them is changed since."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, request("a"), "{torn", request("c", max_tokens=-1), request("d"))
    assert batch(source, target, tiny_folder).exit_code == 1
    write_lines(source, request("a"), request("b"), request("c"), request("d"))
    return source, target


def test_failed_lines_are_asked_again_only_on_demand_and_have_one_result_each(tiny_folder, tmp_path):
    source, target = fail_two(tiny_folder, tmp_path)
    good = [r for r in read_lines(target) if "error" not in r]
    target.chmod(0o640)
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    done = batch(source, link, tiny_folder, "--retry-failed")
    assert done.exit_code == 0, done.output
    assert "4 answered, 0 failed" in done.output and "failed lines" not in done.output
    results = read_lines(target)
    assert results[:2] == good
    assert sorted(r["id"] for r in results[2:]) == ["b", "c"]
    assert all("error" not in r for r in results)
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", "link.jsonl"}
    before = target.read_bytes()
    assert batch(source, target, tmp_path / "no model is needed", "--retry-failed").exit_code == 0
    assert target.read_bytes() == before


def test_a_retry_refuses_what_a_batch_refuses_and_may_be_the_first_run(tiny_folder, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", request("a"))
    target = tmp_path / "out.jsonl"
    target.write_text('{"id": 1, "error": {}}\n{"name": "a diary"}\n')
    before = target.read_bytes()
    done = batch(source, target, tiny_folder, "--retry-failed")
    assert done.exit_code == 1 and "line 2 of" in done.output
    assert target.read_bytes() == before
    assert not (tmp_path / ".out.jsonl.retry").exists()
    assert batch(source, tmp_path / "new.jsonl", tiny_folder, "--retry-failed").exit_code == 0


@pytest.mark.skipif(os.name != "posix", reason="flock")
def test_who_opened_the_results_before_a_retry_replaced_them_is_refused(tiny_folder, tmp_path, monkeypatch):
    source, target = fail_two(tiny_folder, tmp_path)
    with target.open("a+b") as early:
        assert batch(source, target, tiny_folder, "--retry-failed").exit_code == 0
        with pytest.raises(InvalidRequest, match="another `motet batch`"):
            cli_batch._claim(early)


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize(
    ("moment", "num_left"),
    [("os.fsync", 4), ("os.replace", 4), ("anyio.run", 2)],
    ids=["file half written", "file written", "file replaced"],
)
def test_a_retry_killed_at_any_moment_loses_no_answer(tiny_folder, tmp_path, moment, num_left):
    source, target = fail_two(tiny_folder, tmp_path)
    good = [r for r in read_lines(target) if "error" not in r]
    program = (
        f"import anyio, os, signal; {moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL); "
        "from motet.cli import main; main()"
    )
    command = ["batch", str(source), str(target), "--model", str(tiny_folder), "--retry-failed"]
    done = subprocess.run([sys.executable, "-c", program, *command], check=False)
    assert done.returncode == -signal.SIGKILL
    left = read_lines(target)
    assert len(left) == num_left
    assert [r for r in left if "error" not in r] == good
    assert batch(source, target, tiny_folder, "--retry-failed").exit_code == 0
    assert sorted(r["id"] for r in read_lines(target)) == ["a", "b", "c", "d"]
    assert not (tmp_path / ".out.jsonl.retry").exists()


@pytest.mark.skipif(os.name != "posix", reason="the limit of a file's size")
def test_a_full_disk_is_said_in_one_line_and_the_next_start_goes_on(tiny_folder, tmp_path):
    import resource

    source = write_lines(tmp_path / "in.jsonl", *(request(i) for i in range(30)))
    target = tmp_path / "out.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        done = batch(source, target, tiny_folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.exit_code == 1
    assert "OSError: [Errno" in done.output
    assert target.stat().st_size == 2000
    assert batch(source, target, tiny_folder).exit_code == 0
    assert sorted(r["id"] for r in read_lines(target)) == list(range(30))


def fail_at(call: int, function):
    calls = itertools.count(1)

    def wrapped(*args):
        if next(calls) == call:
            raise RuntimeError("the kernel is broken")
        return function(*args)

    return wrapped


def dead(engine):
    raise EngineDead(RuntimeError("a step"))


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [(EngineLoop, "_step", fail_at(5, EngineLoop._step)), (AsyncEngine, "stats", dead)],
    ids=["within a step", "between two results"],
)
def test_a_dead_engine_stops_the_batch_and_its_lines_stay_to_be_answered(
    tiny_folder, tmp_path, monkeypatch, place, name, fault
):
    source = write_lines(tmp_path / "in.jsonl", *(request(i) for i in range(30)))
    target = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(place, name, fault)
        done = batch(source, target, tiny_folder)
    assert done.exit_code == 1
    assert "EngineDead: " in done.output
    assert all("error" not in result for result in read_lines(target))
    assert batch(source, target, tiny_folder).exit_code == 0
    assert sorted(r["id"] for r in read_lines(target)) == list(range(30))


def test_every_line_of_results_is_utf_8(tiny_folder, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(request("\ud800", prompt="x")) + "\n")
    for _ in range(2):
        assert batch(source, tmp_path / "out.jsonl", tiny_folder).exit_code == 0
    assert [r["id"] for r in read_lines(tmp_path / "out.jsonl")] == ["\ud800"]


def test_lines_of_any_system_are_read(tiny_folder, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(request(i)).encode() for i in (1, 2)))
    assert batch(source, tmp_path / "out.jsonl", tiny_folder).exit_code == 0
    assert sorted(r["id"] for r in read_lines(tmp_path / "out.jsonl")) == [1, 2]


@pytest.mark.parametrize(
    "option",
    [
        ["--set", "block_sizes=8"],
        ["--set", "block_size"],
        ["--adapter", "just-a-path"],
        ["--adapter", "a=x", "--adapter", "a=y"],
    ],
)
def test_a_wrong_option_is_named(tiny_folder, tmp_path, option):
    source = write_lines(tmp_path / "in.jsonl", request("a"))
    done = batch(source, tmp_path / "out.jsonl", tiny_folder, *option)
    assert done.exit_code == 2
    assert option[1].partition("=")[0] in done.output


def run_killed(command: list[str], target: Path, rng: random.Random, kills: int) -> None:
    """Runs the command again and again, killing it at random moments after it has begun to answer."""
    for _ in range(kills):
        before = target.stat().st_size if target.exists() else 0
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and (not target.exists() or target.stat().st_size <= before):
                time.sleep(0.005)
            time.sleep(rng.random() * 0.1)
            process.send_signal(signal.SIGKILL)
    assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def check_killed_batch(tiny_folder: Path, tmp_path: Path, num_lines: int, kills: int) -> None:
    requests = [request(i, max_tokens=8 + i % 5) for i in range(num_lines)]
    source, target = write_lines(tmp_path / "in.jsonl", *requests), tmp_path / "out.jsonl"
    program = "from motet.cli import main; main()"
    command = [sys.executable, "-c", program, "batch", str(source), str(target), "--model", str(tiny_folder)]
    run_killed([*command, *SMALL], target, random.Random(kills), kills)
    undisturbed = tmp_path / "undisturbed.jsonl"
    assert batch(source, undisturbed, tiny_folder).exit_code == 0
    results = read_lines(target)
    assert sorted(r["id"] for r in results) == list(range(num_lines))
    assert {r["id"]: r["token_ids"] for r in results} == {
        r["id"]: r["token_ids"] for r in read_lines(undisturbed)
    }


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_batch_killed_at_random_loses_and_repeats_nothing(tiny_folder, tmp_path):
    check_killed_batch(tiny_folder, tmp_path, num_lines=500, kills=3)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_batch_killed_ten_times_loses_and_repeats_nothing(tiny_folder, tmp_path):
    check_killed_batch(tiny_folder, tmp_path, num_lines=500, kills=10)

"""run: what is printed and written, that the text is transformers' own, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmoffload.profiler.store import default_profile_path, save_profile
from tests.cli.conftest import Call, files_below, make_model
from tests.cli.machines import machine

PROMPTS = ("The sea is", "Tokens", "A language model reads a text token by token and", "x")
GEN_LEN = 12


@pytest.fixture(scope="module")
def expected(model: Path) -> list[dict[str, Any]]:
    """What transformers generates for each prompt alone, greedily, in fp32."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    results = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            out = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=GEN_LEN, do_sample=False)
        new = out[0, ids.shape[1] :].tolist()
        results.append({"token_ids": new, "prompt_tokens": ids.shape[1], "completion": tokenizer.decode(new, skip_special_tokens=True)})
    return results


def _job(*lines: Any) -> Path:
    path = Path("job.jsonl")
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8")
    return path


def _results(text: str) -> dict[str, dict[str, Any]]:
    results = [json.loads(line) for line in text.splitlines()]
    assert len({result["id"] for result in results}) == len(results)
    return {result["id"]: result for result in results}


def test_one_prompt_prints_its_completion_and_nothing_else(call: Call, profiled: Path, model: Path, expected: list[dict[str, Any]]) -> None:
    shown = call("run", model, "-p", PROMPTS[0], "--gen-len", GEN_LEN)
    assert shown.code == 0
    assert shown.out == expected[0]["completion"] + "\n"


def test_job_file(call: Call, profiled: Path, model: Path, expected: list[dict[str, Any]]) -> None:
    job = _job(*({"prompt": prompt} for prompt in PROMPTS))
    shown = call(
        "run", model, "--input", job, "--output", "out.jsonl", "--report", "report.json", "--gen-len", GEN_LEN, "--weights-memory", "60%"
    )
    assert (shown.code, shown.out) == (0, "")
    results = _results(Path("out.jsonl").read_text(encoding="utf-8"))
    assert set(results) == {"1", "2", "3", "4"}
    for number, right in enumerate(expected, 1):
        result = results[str(number)]
        assert set(result) == {"id", "completion", "token_ids", "prompt_tokens", "finish_reason", "error"}
        assert {name: result[name] for name in right} == right
        assert (result["finish_reason"], result["error"]) == ("length", None)
    report = json.loads(Path("report.json").read_text(encoding="utf-8"))
    assert report["schema"] == 1
    assert report["prompts_computed"] == len(PROMPTS)
    assert report["measured"]["tokens_per_s"] > 0
    assert set(report["measured"]) == set(report["predicted"])
    assert report["error"]["tokens_per_s"] == pytest.approx(report["measured"]["tokens_per_s"] / report["predicted"]["tokens_per_s"] - 1)
    assert report["plan"]["weights"]["bytes"]["disk"] > 0
    assert report["tasks"]["read_weights"]["count"] > 0


def test_bad_lines_fail_alone(call: Call, profiled: Path, model: Path, expected: list[dict[str, Any]]) -> None:
    job = _job({"id": "good", "prompt": PROMPTS[1]}, "{", {"id": "empty", "prompt": ""}, {"id": "long", "prompt": "x " * 400})
    shown = call("run", model, "--input", job, "--gen-len", GEN_LEN)
    assert shown.code == 1
    results = _results(shown.out)
    assert results["good"]["token_ids"] == expected[1]["token_ids"]
    for line_id, word in (("2", "Line 2 is not valid"), ("empty", "The prompt is empty"), ("long", "256 positions")):
        assert results[line_id]["finish_reason"] == "error"
        assert word in results[line_id]["error"]
    assert "3 of 4 lines failed" in shown.err
    only_bad = call("run", model, "--input", _job("{"), "--output", "bad.jsonl")
    assert only_bad.code == 1
    assert len(_results(Path("bad.jsonl").read_text(encoding="utf-8"))) == 1


def test_lines_have_their_own_options(call: Call, profiled: Path, model: Path, expected: list[dict[str, Any]]) -> None:
    stop = expected[2]["completion"][3:5]
    job = _job(
        {"id": "short", "prompt": PROMPTS[0], "max_new_tokens": 3},
        {"id": "cut", "prompt": PROMPTS[2], "stop": stop},
        {"id": "warm", "prompt": PROMPTS[0], "temperature": 5.0, "seed": 1},
        {"id": "chat", "messages": [{"role": "user", "content": "Hello"}]},
    )
    first = call("run", model, "--input", job, "--gen-len", GEN_LEN)
    assert first.code == 0
    results = _results(first.out)
    assert results["short"]["token_ids"] == expected[0]["token_ids"][:3]
    assert results["cut"]["completion"] == expected[2]["completion"].partition(stop)[0]
    assert results["cut"]["finish_reason"] == "stop"
    assert results["warm"]["token_ids"] != expected[0]["token_ids"]
    assert len(results["chat"]["token_ids"]) == GEN_LEN
    again = call("run", model, "--input", job, "--gen-len", GEN_LEN, "--micro-batch", "1", "--num-micro-batches", "1")
    assert _results(again.out) == results, "a seed gives the same text in any batch"


def test_synthetic_prompts_are_the_same_for_the_same_seed(call: Call, profiled: Path, model: Path) -> None:
    work = ("--num-prompts", "3", "--prompt-len", "9", "--gen-len", "4", "--seed", "5")
    first, second = (call("run", model, *work) for _ in range(2))
    other = call("run", model, *work[:-1], "6")
    assert first.code == 0
    assert len(_results(first.out)) == 3
    assert all(len(result["token_ids"]) == 4 and result["prompt_tokens"] == 9 for result in _results(first.out).values())
    assert _results(first.out) == _results(second.out) != _results(other.out)


def test_existing_output_is_never_touched_unless_asked(call: Call, profiled: Path, model: Path) -> None:
    job = _job({"prompt": PROMPTS[0]})
    Path("out.jsonl").write_text("precious", encoding="utf-8")
    refused = call("run", model, "--input", job, "--output", "out.jsonl", "--gen-len", "2")
    assert refused.code == 1
    assert "exists already" in refused.sentence
    assert Path("out.jsonl").read_text(encoding="utf-8") == "precious"
    assert call("run", model, "--input", job, "--output", "out.jsonl", "--gen-len", "2", "--restart").code == 0
    assert set(_results(Path("out.jsonl").read_text(encoding="utf-8"))) == {"1"}


def test_a_run_keeps_to_its_processors(call: Call, profiled: Path, model: Path, expected: list[dict[str, Any]]) -> None:
    """One processor, one thread, and the same text; in a process of its own, whose processors the kernel tells."""
    script = (
        "import os, sys; from lmoffload.cli.main import main; sys.argv = ['lmoffload', *sys.argv[1:]]\n"
        "try: main()\nfinally: print(sorted(os.sched_getaffinity(0)), file=sys.stderr)"
    )
    cores = sorted(os.sched_getaffinity(0))[-1]
    arguments = ["run", str(model), "-p", PROMPTS[0], "--gen-len", str(GEN_LEN), "--cores", str(cores), "--report", "report.json"]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == str([cores])
    assert done.stdout == expected[0]["completion"] + "\n"
    assert json.loads(Path("report.json").read_text(encoding="utf-8"))["plan"]["threads"]["compute"] == 1


def test_a_plan_made_before_is_run(call: Call, profiled: Path, model: Path, tmp_path: Path, expected: list[dict[str, Any]]) -> None:
    job = _job(*({"prompt": prompt} for prompt in PROMPTS))
    planned = call("plan", model, "--input", job, "--gen-len", GEN_LEN, "--weights-memory", "60%", "--out", "plan.json", "--json")
    assert planned.code == 0
    ran = call("run", model, "--plan", "plan.json", "--input", job, "--report", "report.json")
    assert ran.code == 0
    assert [_results(ran.out)[str(i)]["token_ids"] for i in range(1, 5)] == [right["token_ids"] for right in expected]
    assert json.loads(Path("report.json").read_text(encoding="utf-8"))["plan"] == json.loads(planned.out)

    before = files_below(tmp_path)
    other = make_model(tmp_path / "other", seed=1)
    before |= files_below(other)
    for arguments, code, word in (
        (["run", other, "--plan", "plan.json", "--input", job, "--output", "o.jsonl"], 1, "made for another model"),
        (["run", model, "--plan", "plan.json", "--input", job, "--threads", "1"], 2, "either --plan or these"),
        (["run", model, "--plan", "plan.json", "--input", job, "--gen-len", "99", "--output", "o.jsonl"], 1, "completion of 12 tokens"),
        (["run", model, "--plan", job, "-p", "a"], 1, "plan job.jsonl is not valid"),
    ):
        shown = call(*arguments)
        assert (shown.code, shown.out) == (code, ""), arguments
        assert word in shown.sentence
        assert files_below(tmp_path) == before
    save_profile(machine(name="another"), default_profile_path())
    shown = call("run", model, "--plan", "plan.json", "--input", job, "--output", "o.jsonl")
    assert (shown.code, shown.out) == (1, "")
    assert "made for another machine" in shown.sentence
    assert files_below(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([], 2, "Nothing to complete"),
        (["-p", "a", "--num-prompts", "2"], 2, "Give one of"),
        (["--chat", "--num-prompts", "2"], 2, "--chat wraps"),
        (["-p", ""], 1, "The prompt is empty"),
        (["-p", "a", "--output", "o"], 2, "goes to standard output"),
        (["-p", "a", "--restart"], 2, "--restart belongs to --output"),
        (["-p", "a", "--device-memory", "1GiB"], 2, "no device"),
        (["-p", "a", "--cores", "one"], 2, "no list of processors"),
        (["-p", "a", "--cores", "65535"], 2, "may not use the processor 65535"),
        (["-p", "a", "--temperature", "-1"], 2, "temperature is -1"),
        (["-p", "a", "--top-p", "2"], 2, "top-p is 2"),
        (["-p", "a", "--report", "no/such/folder.json"], 1, "does not exist"),
        (["--input", "job.jsonl", "--output", "job.jsonl", "--restart"], 2, "--input and --output name job.jsonl"),
        (["--input", "job.jsonl", "--report", "./job.jsonl"], 2, "--input and --report"),
        (["-p", "a\udcff"], 1, "not valid text"),
        (["-p", "a\udcff", "--chat"], 1, "not valid text"),
        (["--num-prompts", "1000001"], 2, "at most 1000000"),
        (["--input", "absent.jsonl"], 1, "absent.jsonl cannot be read"),
        (["-p", "a", "--weights-memory", "0%"], 3, "--weights-memory"),
        (["-p", "a", "--gen-len", "999"], 1, "256 positions"),
    ],
)
def test_wrong_values_are_one_sentence(call: Call, profiled: Path, model: Path, arguments: list[str], code: int, word: str) -> None:
    _job({"prompt": "a"})
    before = files_below(profiled.parent)
    shown = call("run", model, *arguments)
    assert (shown.code, shown.out) == (code, "")
    assert word in shown.sentence
    assert len(shown.err.splitlines()) == 1
    assert files_below(profiled.parent) == before


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_runs_keep_what_is_finished(profiled: Path, model: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "lmoffload", "run", str(model), "--num-prompts", "500", "--prompt-len", "20", "--gen-len", "20"]
    batches = ["--micro-batch", "1", "--num-micro-batches", "1", "--output", "out.jsonl"]
    asked = ["env", "--default-signal", *command, *batches]  # in a shell's background job Ctrl-C is ignored, and that is handed on
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        output = Path("out.jsonl")
        while process.poll() is None and (not output.exists() or not output.read_text(encoding="utf-8").count("\n")):
            time.sleep(0.02)
        process.send_signal(how)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    results = _results(output.read_text(encoding="utf-8"))
    assert 1 <= len(results) < 500
    assert all(len(result["token_ids"]) == 20 for result in results.values())

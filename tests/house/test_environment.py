"""The threads' environment is set before torch is loaded, and a torch that was loaded without it is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from lmoffload import environment


def _run(code: str, **variables: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return subprocess.run([sys.executable, "-c", code], env=clean | variables, capture_output=True, text=True, check=True).stdout.strip()


def test_policy_is_set_where_torch_is_not_loaded() -> None:
    code = "import os; from lmoffload.environment import prepare_threads; print(prepare_threads(), os.environ['OMP_WAIT_POLICY'])"
    assert _run(code) == "() PASSIVE"


def test_torch_loaded_before_gives_a_remark() -> None:
    code = (
        "import sys, types; sys.modules['torch'] = types.ModuleType('torch')\n"
        "import os; from lmoffload.environment import prepare_threads\n"
        "print(*prepare_threads()); print(*prepare_threads()); print('OMP_WAIT_POLICY' in os.environ)"
    )
    first, second, is_set = _run(code).split("\n")
    assert "torch was loaded before" in first
    assert second == first, "the remark must not vanish at the second call"
    assert is_set == "False"


def test_the_users_own_policy_is_kept_and_told() -> None:
    code = "from lmoffload.environment import prepare_threads; print(*prepare_threads())"
    assert "OMP_WAIT_POLICY is ACTIVE" in _run(code, OMP_WAIT_POLICY="ACTIVE")
    assert _run(code, OMP_WAIT_POLICY="passive") == ""


def test_allocator_is_prepared_without_complaint() -> None:
    environment.prepare_allocator()


def test_importing_lmoffload_does_no_work() -> None:
    code = (
        "import sys, os; import lmoffload; assert 'OMP_WAIT_POLICY' not in os.environ\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'pydantic') if m in sys.modules])"
    )
    assert _run(code) == "[]"


def test_unknown_attributes_are_refused() -> None:
    import lmoffload

    assert sorted(dir(lmoffload)) == ["Engine", "__version__", "plan", "profile"]
    with pytest.raises(AttributeError, match="no attribute 'solve'"):
        _ = lmoffload.solve


def test_planning_for_prompts_sets_the_policy_before_the_tokenizer_loads_torch() -> None:
    code = (
        "import sys, lmoffload\n"
        "from lmoffload.checkpoint import make_dummy\n"
        "model = make_dummy('smollm2-135m', sys.argv[1], layers=1)\n"
        "lmoffload.plan(model, prompts=['The sea is'], gen_len=2, machine='xeon-avx512-2-cores')\n"
        "from lmoffload.environment import thread_remarks\n"
        "print(thread_remarks(), 'torch' in sys.modules)"
    )
    with tempfile.TemporaryDirectory() as folder:
        assert _run(code.replace("sys.argv[1]", repr(f"{folder}/model"))) == "() True"

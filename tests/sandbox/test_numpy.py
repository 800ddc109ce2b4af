"""Honest programs with numpy: what they return crosses as Python's numbers and lists."""

import ast
import math

import pytest

pytest.importorskip("numpy")

from gdpo_tune.core.errors import SandboxUnavailable
from gdpo_tune.sandbox import Call, CodeSandbox, Job
from tests.support.tables import read_named

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def sandbox():
    with CodeSandbox(modules=("numpy",)) as sandbox:
        yield sandbox


@pytest.mark.parametrize(("expression", "x", "expected"), read_named("sandbox_jobs", "numpy"))
def test_values_of_numpy_are_compared_as_python_values(run, expression, x, expected):
    code = f"import numpy as np\ndef f(x): return {expression}"
    arguments, value = (ast.literal_eval(x),), eval(expected, {"nan": math.nan})
    assert run(code, calls=(Call("f", arguments, value),)).passed
    assert run(code, calls=(Call("f", arguments, "something else"),)).status == "failed"


def test_a_value_without_a_python_form_is_a_wrong_answer_only(run):
    code = "import numpy as np\ndef f(): return np.longdouble(1)"
    assert run(code, "assert f() == 1").status == "failed"


def test_numpys_generator_is_seeded_by_the_job(run):
    # What `numpy.random.seed(7)` is documented to start: MT19937, the same in every version.
    code = "import numpy as np\ndef f(): return round(np.random.rand(), 9)"
    seeds = (7, 7, 8, 2**32 + 7)  # of which numpy takes 32 bits
    found = [run(code, "assert f() == 0.076308289", seed=seed).status for seed in seeds]
    assert found == ["passed", "passed", "failed", "passed"]


def test_no_thread_of_a_library_waits_in_a_candidate(run):
    code = "import numpy as np\ndef f(n): return (np.ones((n, n)) @ np.ones((n, n))).sum() == n**3"
    assert run(code, "assert f(400) == True").passed


@pytest.mark.parametrize("name", ["no_such_package", "numpy.no_such_part", ""])
def test_a_module_that_cannot_be_had_is_named_before_any_work(name):
    with pytest.raises(SandboxUnavailable, match=name or "''"):
        CodeSandbox(modules=(name,))


def test_a_module_that_starts_a_thread_is_refused(tmp_path, monkeypatch):
    thread = "threading.Thread(target=time.sleep, args=(60,), daemon=True)"
    (tmp_path / "busy.py").write_text(f"import threading, time\n{thread}.start()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SandboxUnavailable, match=r"thread.*busy"):
        CodeSandbox(modules=("busy",))


def test_a_module_that_prints_when_it_is_loaded_is_no_trouble(tmp_path, monkeypatch):
    (tmp_path / "loud.py").write_text("print('hello', flush=True)\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    job = Job("import loud\ndef f(): return loud.value", (Call("f", (), 3),))
    with CodeSandbox(modules=("loud",)) as loud:
        assert loud.run_batch([job])[0].passed

"""Honest programs with numpy: what they return crosses as Python's numbers and lists."""

import pytest

pytest.importorskip("numpy")

from gdpo_tune.core.errors import SandboxUnavailable
from gdpo_tune.sandbox import Call, CodeSandbox, Job

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def sandbox():
    with CodeSandbox(modules=("numpy",)) as sandbox:
        yield sandbox


PROGRAMS = {
    "mean": ("np.mean(x)", [[1, 2, 4.5]], 2.5),
    "array": ("np.array(x) * 2", [[1, 2]], [2, 4]),
    "matrix": ("np.array(x) @ np.eye(2)", [[[1, 2], [3, 4]]], [[1, 2], [3, 4]]),
    "integer": ("np.int64(x) + 1", [2], 3),
    "large_integer": ("np.uint64(2**63) + np.uint64(x)", [1], 2**63 + 1),
    "boolean": ("np.array([x]).any()", [1], True),
    "single": ("np.float32(x) / 4", [1], 0.25),
    "nan": ("np.array([np.nan])", [0], [float("nan")]),
    "string": ("np.array(['a', x])[1]", ["b"], "b"),
    "inside_containers": ("{np.int64(1): (np.bool_(x), np.arange(2))}", [1], {1: (True, [0, 1])}),
    "no_dimension": ("np.array(x)", [7], 7),
    "solve": ("np.linalg.solve(np.array(x), [2, 8])", [[[2, 0], [0, 4]]], [1, 2]),
    "fourier": ("abs(np.fft.fft(x))", [[1, 0, 0]], [1, 1, 1]),
    "polynomial": ("np.polynomial.Polynomial([1, 2])(x)", [3], 7),
    "masked": ("np.ma.masked_equal(x, 2).sum()", [[1, 2, 3]], 4),
    "text": ("repr(np.arange(x))", [3], "array([0, 1, 2])"),
    "generator": ("np.random.default_rng(x).integers(0, 1)", [3], 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_of_numpy_are_compared_as_python_values(sandbox, name):
    expression, arguments, expected = PROGRAMS[name]
    code = f"import numpy as np\ndef f(x): return {expression}"
    wrong = "something else"
    right, other = sandbox.run_batch(
        [Job(code, (Call("f", tuple(arguments), value),)) for value in (expected, wrong)]
    )
    assert right.status == "passed", right
    assert other.status == "failed"


def test_a_value_without_a_python_form_is_a_wrong_answer_only(sandbox):
    code = "import numpy as np\ndef f(): return np.longdouble(1)"
    (result,) = sandbox.run_batch([Job(code, (Call("f", (), 1),))])
    assert result.status == "failed"


def test_numpys_generator_is_seeded_by_the_job(sandbox):
    # What `numpy.random.seed(7)` is documented to start: MT19937, the same in every version.
    code = "import numpy as np\ndef f(): return round(np.random.rand(), 9)"
    call = (Call("f", (), 0.076308289),)
    same, again, other = sandbox.run_batch([Job(code, call, seed=seed) for seed in (7, 7, 8)])
    assert (same.status, again.status, other.status) == ("passed", "passed", "failed")


def test_no_thread_of_a_library_waits_in_a_candidate(sandbox):
    code = "import numpy as np\ndef f(n): return (np.ones((n, n)) @ np.ones((n, n))).sum() == n**3"
    (result,) = sandbox.run_batch([Job(code, (Call("f", (400,), True),))])
    assert result.status == "passed", result


def test_numpy_is_not_there_unless_asked_for():
    with CodeSandbox() as plain:
        (result,) = plain.run_batch([Job("import numpy", (Call("f", (), 1),))])
    assert result.status == "error"
    assert "numpy" in result.untrusted_detail


@pytest.mark.parametrize("name", ["no_such_package", "numpy.no_such_part", ""])
def test_a_module_that_cannot_be_had_is_named_before_any_work(name):
    with pytest.raises(SandboxUnavailable, match=name or "''"):
        CodeSandbox(modules=(name,))


def test_a_module_that_starts_a_thread_is_refused(tmp_path, monkeypatch):
    (tmp_path / "busy.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SandboxUnavailable, match=r"thread.*busy"):
        CodeSandbox(modules=("busy",))


def test_a_module_that_prints_when_it_is_loaded_is_no_trouble(tmp_path, monkeypatch):
    (tmp_path / "loud.py").write_text("print('hello', flush=True)\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    with CodeSandbox(modules=("loud",)) as loud:
        code = "import loud\ndef f(): return loud.value"
        (result,) = loud.run_batch([Job(code, (Call("f", (), 3),))])
    assert result.status == "passed", result

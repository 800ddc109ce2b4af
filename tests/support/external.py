"""Helpers of the tests of external sandboxes: a plain job, and faulty answers of a service."""

import time

from gdpo_tune.sandbox import Call, Job
from tests.support.sandbox_service import build_response

GOOD = Job("def f(x): return x + 1", (Call("f", (1,), 2),))


def wait_until(condition):
    while not condition():
        time.sleep(0.005)


def run_one_job(sandbox, job):
    [result] = sandbox.run_batch([job])
    return result


def hang(handler):
    handler.server.released.wait()


def hang_up(handler):
    handler.close_connection = True


def run_and_hang_up(handler):
    handler.run_code()
    handler.close_connection = True


def build_answer(content, status=200, headers=(), kind="application/json"):
    return lambda handler: handler.answer(content, status, headers, kind)


def build_run_answer(stdout="", status="Finished", code=0, stderr=""):
    run = {"status": status, "execution_time": 0.1, "return_code": code}
    return build_response("Success", run | {"stdout": stdout, "stderr": stderr})

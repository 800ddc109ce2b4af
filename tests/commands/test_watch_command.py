"""`python -m gdpo_tune.watch`: its address, its token, its port, and its end."""

import re
import signal
import socket
import stat
import subprocess
import sys
from contextlib import closing, contextmanager

import httpx
import pytest

from gdpo_tune import watch
from gdpo_tune.core.errors import SpecError, UsageError
from gdpo_tune.web.page_server import DEFAULT_PORT
from tests.support.free_ports import find_free_port
from tests.support.paths import ROOT
from tests.support.tuning import load_code_spec
from tests.support.web import start_sweep, unpack_finished_sweep

SPACE = ROOT / "search_spaces" / "code.yaml"


@pytest.fixture
def sweep(tmp_path):
    return unpack_finished_sweep(tmp_path)


@contextmanager
def start(*words):
    """Run the command; yield what it prints until the address, that address, and its process."""
    command = [sys.executable, "-m", "gdpo_tune.watch", *map(str, words)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        lines = []
        while not lines or "http://" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        try:
            yield "".join(lines), re.search(r"http://\S+", lines[-1])[0], process
        finally:
            process.kill()


@pytest.mark.system
@pytest.mark.integration
def test_the_page_is_served_until_ctrl_c(sweep):
    with start(sweep, "--port", find_free_port()) as (printed, address, process):
        assert printed.startswith("code: http://127.0.0.1:")
        with httpx.Client(timeout=60) as client:  # the first answer imports much
            assert client.get(address).status_code == 200
            root = address.partition("?")[0]
            state = client.get(f"{root}api/state").json()
        assert state["status"]["text"] == "Finished: all 16 configurations were tried."
        assert httpx.get(root).status_code == 403
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        errors = process.stderr.read()
    assert "Traceback" not in errors
    assert "refused a request from 127.0.0.1" in errors
    assert address.partition("=")[2] not in errors


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Sweeps.Example", "sweeps.example"),
        ("localhost:8443", "localhost:8443"),
        ("[::1]:8443", "[::1]:8443"),
        ("bücher.example", "xn--bcher-kva.example"),  # as browsers send it: RFC 5891
    ],
)
def test_the_name_of_a_proxy_is_as_browsers_send_it(text, name):
    assert watch.build_parser().parse_args(["x", "--allow-host", text]).allow_host == [name]
    assert str(DEFAULT_PORT) in watch.build_parser().format_help()


@pytest.mark.integration
def test_a_browser_and_other_machines_are_served_only_on_request(sweep, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    monkeypatch.setattr("os.nice", lambda _: 0)

    def serve(*words):
        assert watch.main([str(sweep), "--port", str(find_free_port()), *words]) == 0

    serve()
    assert opened == []
    serve("--open")
    (address,) = opened
    assert "/?token=" in address
    assert "warning" not in capsys.readouterr().err
    serve("--host", "0.0.0.0")
    printed = capsys.readouterr()
    assert f"http://{socket.gethostname()}:" in printed.out
    assert "warning: everyone who has this address can steer" in printed.err


def test_a_sweep_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no sweep in"):
        watch.main([str(tmp_path / "nowhere")])
    (tmp_path / "broken.yaml").write_text("task: [")
    with pytest.raises(SpecError):
        watch.main([str(tmp_path / "broken.yaml")])


def test_a_taken_port_is_one_line(sweep):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"--port {port} is taken; choose another") as caught:
            watch.main([str(sweep), "--port", str(port)])
    assert caught.value.exit_status == 2
    assert "\n" not in str(caught.value)


def test_the_token_outlives_the_server_and_is_for_the_owner_alone(sweep):
    token = watch.read_token(sweep)
    assert watch.read_token(sweep) == token
    file = sweep / watch.TOKEN
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)  # others may have read it
    assert watch.read_token(sweep) != token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("short\n")
    assert len(watch.read_token(sweep)) == 43


def test_without_a_directory_the_token_is_not_kept(tmp_path):
    first = watch.read_token(tmp_path / "nowhere")
    assert len(first) == 43
    assert watch.read_token(tmp_path / "nowhere") != first


@pytest.mark.parametrize(
    ("line", "storage"),
    [("", "runs"), ("storage: 'runs #1'\n", "runs #1")],  # YAML would misread the latter
)
def test_a_file_names_the_sweep_that_it_will_start(tmp_path, monkeypatch, line, storage):
    monkeypatch.chdir(tmp_path)
    space = tmp_path / "own.yaml"
    space.write_text(f"extends: {SPACE}\nname: code\n{line}")
    load, location = watch.find_spec(str(space))
    assert location == f"{storage}/code"
    assert load().search.is_divided
    changes = ["name=code", "search.trials=5"]
    start_sweep(load_code_spec(tmp_path / "made", changes, SPACE)).close()
    (tmp_path / storage).mkdir()
    (tmp_path / "made" / "sweep").rename(tmp_path / storage / "code")
    assert load().search.trials == 5
    assert load().location == location

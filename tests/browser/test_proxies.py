"""The live page behind real proxies, in a real browser: it opens, follows the sweep and steers."""

import shutil
import subprocess
from contextlib import closing, contextmanager

import httpx
import pytest

from gdpo_tune.ledger.requests import list_pending
from tests.support.browser import open_browser, wait
from tests.support.free_ports import find_free_port
from tests.support.tuning import load_code_spec
from tests.support.web import build_guard, build_view, report_step, serve_page, start_sweep

pytestmark = pytest.mark.browser

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin") or ""
JUPYTER = shutil.which("jupyter-server") or ""
NAME = "sweeps.example"
# The defaults of nginx stay: it sends its own address as Host, buffers, and speaks HTTP/1.0.
# Source: nginx.org, ngx_http_proxy_module: with a URI in proxy_pass the location is cut off.
CONFIGURATION = """
daemon off; master_process off; pid {directory}/nginx.pid; error_log stderr;
events {{}}
http {{
  access_log off; gzip on; gzip_types *; gzip_min_length 1;
  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;
  server {{
    listen 127.0.0.1:{port};
    location /cut/ {{ proxy_pass http://127.0.0.1:{page}/; }}
    location /whole/ {{ proxy_pass http://127.0.0.1:{page}; }}
  }}
  server {{
    listen 127.0.0.1:{tls} ssl;
    ssl_certificate {directory}/own.pem; ssl_certificate_key {directory}/key.pem;
    location / {{
      proxy_pass http://127.0.0.1:{page};
      proxy_set_header Host $http_host; proxy_set_header X-Forwarded-Proto $scheme;
    }}
  }}
}}
"""


@pytest.fixture(scope="module")
def browser():
    with open_browser(f"--host-resolver-rules=MAP {NAME} 127.0.0.1") as browser:
        yield browser


@contextmanager
def run_proxy(command, address):
    """Run a proxy until the test ends; it answers at `address`."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:

        def answers():
            assert process.poll() is None, process.stderr.read().decode()
            try:
                return httpx.get(address, verify=False)
            except httpx.TransportError:
                return None

        try:
            wait(answers)
            yield
        finally:
            process.terminate()


@contextmanager
def serve_sweep(directory, proxied, root_path):
    """Serve the page of a running sweep; yield its ledger, its port and its token."""
    guard = build_guard(proxied=proxied)
    with start_sweep(load_code_spec(directory)) as ledger:
        view, sweep = build_view(ledger.spec)
        with closing(sweep), serve_page(view, guard, root_path) as client:
            yield ledger, client.base_url.port, guard.token


def check_page(browser, ledger, address, picture=None):
    """Open the page, see a step of the sweep on it, and pause the sweep."""
    context = browser.new_context(ignore_https_errors=True)
    page = context.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(address)
    wait(lambda: page.query_selector_all("#front .main-svg"))
    wait(lambda: page.query_selector_all("#curves .main-svg"))
    assert "token" not in page.url
    report_step(ledger, 2, 7)
    wait(lambda: "step 7 " in page.inner_text("#running"))
    page.click("#pause")
    (file,) = wait(lambda: list_pending(ledger.directory))
    assert (file.request.action, file.request.author.endswith(" (page)")) == ("pause", True)
    wait(lambda: "pending" in page.inner_text("#requests"))
    if picture:
        page.screenshot(path=picture)
    context.close()
    assert errors == []


@pytest.mark.skipif(not NGINX, reason="no nginx on this machine")
@pytest.mark.parametrize("path", ["/cut/", "/whole/", "tls"])
def test_the_page_behind_nginx(browser, tmp_path, path):
    port, tls = find_free_port(), find_free_port()
    host = f"{NAME}:{tls if path == 'tls' else port}"
    request = f"req -x509 -newkey rsa:2048 -nodes -subj /CN={NAME}".split()
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "own.pem"]
    subprocess.run(["openssl", *request, *files], check=True, capture_output=True)
    with serve_sweep(tmp_path, [host], "/whole") as (ledger, page, token):
        file = tmp_path / "nginx.conf"
        places = {"directory": tmp_path, "port": port, "tls": tls, "page": page}
        file.write_text(CONFIGURATION.format(**places))
        address = f"https://{host}/" if path == "tls" else f"http://{host}{path}"
        with run_proxy([NGINX, "-p", tmp_path, "-c", file], f"http://127.0.0.1:{port}/"):
            check_page(browser, ledger, f"{address}?token={token}")


@pytest.mark.skipif(not NGINX, reason="no nginx on this machine")
def test_a_proxy_that_is_not_named_is_told_how(browser, tmp_path):
    """The page opens, because nginx sends the page's own address; a change names the way out."""
    port = find_free_port()
    with serve_sweep(tmp_path, [], "") as (ledger, page, token):
        file = tmp_path / "nginx.conf"
        places = {"directory": tmp_path, "port": port, "tls": 0, "page": page}
        plain = CONFIGURATION.partition("  server {{\n    listen 127.0.0.1:{tls}")[0] + "}}"
        file.write_text(plain.format(**places))
        with run_proxy([NGINX, "-p", tmp_path, "-c", file], f"http://127.0.0.1:{port}/"):
            shown = browser.new_page()
            shown.goto(f"http://{NAME}:{port}/cut/?token={token}")
            wait(lambda: shown.locator("#pause").is_enabled())
            shown.click("#pause")
            wait(lambda: f"--allow-host {NAME}:{port}" in shown.inner_text("#answer"))
            assert list_pending(ledger.directory) == []
            shown.close()


@pytest.mark.skipif(not JUPYTER, reason="no jupyter-server on this machine")
@pytest.mark.parametrize("path", ["proxy/{}/", "proxy/absolute/{}/"])
def test_the_page_behind_jupyter_server_proxy(browser, tmp_path, path):
    """Source: jupyter-server-proxy, Accessing arbitrary ports: `absolute` passes the path on."""
    port = find_free_port()
    base = "/user/ann@lab/"
    root_path = f"{base}proxy/absolute/{{}}"
    with serve_sweep(tmp_path, [f"{NAME}:{port}"], root_path) as (ledger, page, token):
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": port,
            "ServerApp.port_retries": 0,
            "ServerApp.base_url": base,
            "ServerApp.root_dir": tmp_path,
            "ServerApp.allow_remote_access": True,
            "IdentityProvider.token": "",
        }
        command = [JUPYTER, "--no-browser", "--allow-root"]
        command += [f"--{name}={value}" for name, value in options.items()]
        root = f"http://{NAME}:{port}{base}"
        with run_proxy(command, f"http://127.0.0.1:{port}{base}api"):
            check_page(browser, ledger, f"{root}{path.format(page)}?token={token}")

"""`resources.env`: what it means, and that no secret is shown."""

import pytest

from gdpo_tune.core.errors import ResourcesError, SpecError
from gdpo_tune.core.redaction import is_secret, redact_secrets
from gdpo_tune.spec import Resources, load_spec
from gdpo_tune.spec.dry_run import render_dry_run
from gdpo_tune.spec.machine import check_resources
from tests.support.spec_cases import GOOD

SECRET = "sesame-2718281828"


def write_env(env):
    """Return the good file with these variables."""
    return GOOD + f"resources:\n  env: {env}\n"


def test_names_and_values(load):
    listed = load(text=write_env("[HF_TOKEN, HF_HOME, NCCL_DEBUG=INFO, A=b=c]")).resources.env
    assert listed == ("HF_TOKEN", "HF_HOME", "NCCL_DEBUG=INFO", "A=b=c")
    mapped = load("resources.env={NCCL_DEBUG: INFO, VLLM_PORT: 81, USE_IT: true}").resources.env
    assert mapped == ("NCCL_DEBUG=INFO", "VLLM_PORT=81", "USE_IT=true")
    here = {"HF_TOKEN": SECRET, "HF_HOME": "/models", "OTHER": "x"}
    assert Resources(env=listed).collect_variables(here) == {
        "HF_TOKEN": SECRET,
        "HF_HOME": "/models",
        "NCCL_DEBUG": "INFO",
        "A": "b=c",
    }


TEXTS = (
    *("9.0", "1.10", "007", "0x1F", "0o17", "1_000", "1e3", "+5", "-0", ".5", "1.", ".inf"),
    *("true", "True", "yes", "no", "2026-11-26", "12:30:45", "2026-11-26T10:00:00Z"),
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_value_is_the_text_that_is_written(load, text):
    """Values of variables are texts: environ(7), and YAML 1.2.2, 10.3.2, on what 007 resolves to.

    PyTorch wants `TORCH_CUDA_ARCH_LIST=9.0`, not 9; `1.10` is another version than 1.1.
    """
    expected = (f"A={text}",)
    for overrides, env in (
        ((), f"{{A: {text}}}"),
        ((), f'{{A: "{text}"}}'),
        ((f"resources.env.A={text}",), ""),
        ((f"resources.env={{A: {text}}}",), ""),
        ((f"resources.env.A={text}",), "{A: 3}"),
    ):
        spec = load("search.trials=7", *overrides, text=write_env(env) if env else GOOD)
        assert spec.resources.env == expected
        assert spec.search.trials == 7  # elsewhere numbers are numbers


def test_values_of_extended_files_and_aliases_are_texts_too(load, tmp_path):
    (tmp_path / "base.yaml").write_text(GOOD + "resources:\n  env:\n    A: 1.10\n    B: 1e3\n")
    child = tmp_path / "child.yaml"
    child.write_text("extends: base.yaml\nresources.env.B: &six 0x6\nresources.env.C: *six\n")
    assert set(load_spec(child).resources.env) == {"A=1.10", "B=0x6", "C=0x6"}


def test_only_the_name_of_a_secret_is_kept(load, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    spec = load("resources.env=[HF_TOKEN]")
    assert SECRET not in spec.dump_yaml() + render_dry_run(spec) + repr(spec)
    assert "HF_TOKEN" in spec.dump_yaml()


@pytest.mark.parametrize(
    ("env", "key"),
    [
        (f"{{HF_TOKEN: {SECRET}}}", "resources.env.HF_TOKEN"),
        (f"{{hf_token: {SECRET}}}", "resources.env.hf_token"),
        (f"[HF_TOKEN={SECRET}]", "resources.env[0]"),
        (f"[A=b, AWS_SECRET_ACCESS_KEY={SECRET}]", "resources.env[1]"),
        (f"{{DATABASE: 'postgresql://me:{SECRET}@host/db'}}", "resources.env.DATABASE"),
        ("{ANYTHING: hf_" + "a" * 34 + "}", "resources.env.ANYTHING"),
    ],
)
def test_a_secret_in_the_file_is_refused_and_not_repeated(refuse, env, key):
    (problem,) = refuse(text=write_env(env))
    assert problem.key == key
    assert "a secret in a file" in problem.reason
    assert "write the name alone" in problem.fix
    assert SECRET not in str(SpecError([problem]))
    assert "aaaa" not in str(SpecError([problem]))


@pytest.mark.parametrize(
    "override",
    [
        f"resources.env.HF_TOKEN={SECRET}",
        f"resources.env.hf_token={SECRET}",
        f"resources.env=[HF_TOKEN={SECRET}]",
        f"resources.env=[hf_token=two words {SECRET}]",
        f'resources.env={{"hf_token": {SECRET}}}',
        f"resources={{env: {{hf_token: {SECRET}}}}}",
        f"resources.env={{HF_TOKEN=: {SECRET}}}",
        f'resources.env={{hf_token: "{SECRET}',  # no YAML
        f"resources.env: {{hf_token: {SECRET}}}",  # not KEY=VALUE
        f"resources.env.HF_TOKEN=two words {SECRET}",
        f"resources.environment={{HF_TOKEN: {SECRET}}}",
        f"MY_PASSWORD=two words {SECRET}",
    ],
)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(refuse, override):
    (problem,) = refuse(override)
    text = str(SpecError([problem]))
    assert problem.where.startswith("--set MY_PASSWORD" if "MY" in override else "--set resources")
    assert SECRET not in text
    assert ("MY_PASSWORD = ***: unknown key" in text) == ("MY" in override)
    assert "environment" not in override or "unknown key" in text


@pytest.mark.parametrize(
    "env",
    [
        f"{{HF_TOKEN: [{SECRET}]}}",
        f"{{A: {{hf_token: {SECRET}}}}}",
        f"HF_TOKEN={SECRET}",
        f"hf_token=two words {SECRET}",
        f"[{{HF_TOKEN: {SECRET}}}]",
        f"[{{hf_token: [{SECRET}]}}]",
        "{A: [hf_" + SECRET.replace("-", "_") + "_and_more]}",
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(refuse, env):
    problems = refuse(text=write_env(env))
    assert problems[0].key.startswith("resources.env")
    assert SECRET not in str(SpecError(problems))


def test_a_variable_that_is_not_set_is_refused_before_work_starts(load, tmp_path):
    spec = load("resources.env=[HF_TOKEN, HF_HOME]")
    with pytest.raises(ResourcesError, match="not set here: HF_TOKEN") as caught:
        check_resources(spec, {"HF_HOME": "/models", "RAY_ADDRESS": "auto"}, tmp_path)
    assert "fix: export HF_TOKEN=" in str(caught.value)
    check_resources(spec, {"HF_HOME": "/models", "HF_TOKEN": SECRET}, tmp_path)


SECRET_NAMES = (
    *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "PGPASSWORD"),
    *("OPENAI_APIKEY", "MY_PAT", "SSH_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "DB_PASS"),
)
OTHER_NAMES = (
    *("HF_HOME", "TOKENIZERS_PARALLELISM", "NCCL_SOCKET_IFNAME", "VLLM_MAX_TOKENS", "HF_HUB"),
    *("RAY_AUTH_MODE", "HF_TOKEN_PATH", "KEYBOARD", "COMPASS", "BYPASS_CHECKS", "PYTHONPATH"),
)


@pytest.mark.parametrize("name", SECRET_NAMES + OTHER_NAMES)
def test_secret_names(name):
    assert is_secret(name) == (name in SECRET_NAMES)


@pytest.mark.parametrize(
    ("value", "secret"),
    [
        ("Bearer hf_abcdefghijklmnopqrstuvwx", True),
        ("postgresql://me:word@host/db?sslmode=require", True),
        ("disk-abcdefghijklmnopqrstuvwx", False),
        ("https://host:8443/path", False),
    ],
)
def test_secrets_are_found_inside_values(value, secret):
    assert is_secret("PLAIN", value) is secret


def test_texts_lose_their_secrets():
    text = "a {HF_TOKEN: abc, A: b} API_KEY='x y' steps=5 MAX_TOKENS=7"
    assert redact_secrets(text) == "a {HF_TOKEN: ***, A: b} API_KEY=*** steps=5 MAX_TOKENS=7"

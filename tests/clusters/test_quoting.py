"""One directory with every character that some reader takes for its own, through all renderers.

Each text is read back by the rules of its reader, which the helpers below follow line by line.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import replace

import pytest
from ruamel.yaml import YAML

from gdpo_tune.clusters.render import build_job_script, build_ray_job
from tests.support.render import KUBERAY, LOCAL, SLURM, read_manifests, render
from tests.support.schedule import load_scheduled_sweep

NAMES = (
    "-My Search 100%j %%n 'it' \"was\" ?#$HOME $$ ${X} ;&|<>(a)[b]{c}*~! \\%d \\\\e -ü",
    "My Search 100%j",
    "ends with\\",
    "ends with a blank ",
)
IDS = ("all", "percent", "backslash", "blank")


@pytest.fixture(params=NAMES, ids=IDS)
def project(request, tmp_path, monkeypatch):
    """Return a directory of that name, whose environment has the interpreter."""
    directory = tmp_path / request.param
    directory.mkdir()
    monkeypatch.setattr(sys, "executable", f"{directory}/.venv/bin/python")
    return directory


def read_shell(script, beginning):
    return shlex.split(beginning + find_line(script, beginning))


def find_line(text, beginning):
    (line,) = [line for line in text.split("\n") if line.startswith(beginning)]
    return line.removeprefix(beginning)


def build_words(python):
    return [python, "-m", "gdpo_tune.schedule", "sweeps/nightly.yaml", "tick"]


def read_cron_command(command: str, *, also_backslash: bool) -> str:
    """crontab(5): % ends the command unless escaped by a backslash, which is removed.

    Source: child_process in do_command.c of Vixie cron; FreeBSD's reads `\\\\` as `\\` in this way
    too, cronie and Debian's do not.
    """
    read, escaped = list[str](), False
    for character in command:
        if escaped and (character == "%" or (also_backslash and character == "\\")):
            read[-1] = character
            escaped = False
            continue
        if not escaped and character == "%":
            break
        read.append(character)
        escaped = character == "\\" and not escaped
    return "".join(read)


@pytest.mark.parametrize(
    ("target", "text", "options"),
    [
        ("crontab", LOCAL, {"also_backslash": False}),
        ("crontab", LOCAL, {"also_backslash": True}),
        ("slurm", SLURM, None),
    ],
    ids=["cron", "FreeBSD", "scrontab"],
)
def test_lines_of_cron(project, target, text, options):
    (text,) = render(load_scheduled_sweep(project, text), target).values()
    line = find_line(text, "*/5 * * * * ")
    words = shlex.split(read_cron_command(line, **options) if options else line)
    assert words == ["cd", str(project), "&&", *build_words(f"{project}/.venv/bin/python")]


def read_systemd_words(line: str) -> list[str]:
    """systemd.service(5), "Command lines": quotes, C's escapes, `%%`, and `$$` but in the program.

    Source: extract_first_word (EXTRACT_UNQUOTE | EXTRACT_CUNESCAPE) and string_is_safe.
    """
    pattern = r'"((?:[^"\\]|\\.)*)"(?:\s|$)|([^\s"\'\\]+)(?:\s|$)'
    matches = list(re.finditer(pattern, line))
    assert "".join(match[0] for match in matches) == line
    words: list[str] = []
    for quoted, plain in (match.groups() for match in matches):
        word = re.sub(r"\\(.)", r"\1", quoted) if plain is None else plain
        assert "%" not in word.replace("%%", "")
        word = word.replace("%%", "%")
        if words:
            assert "$" not in word.replace("$$", "")
            word = word.replace("$$", "$")
        words.append(word)
    assert not set(words[0]) & set("\"'\\"), "Executable name contains special characters"
    return words


def test_systemd(project):
    service = render(load_scheduled_sweep(project, LOCAL), "systemd")["gdpo-tune-nightly.service"]
    words = read_systemd_words(find_line(service, "ExecStart="))
    if words[0] == "/bin/sh":
        assert words[1:3] == ["-c", 'exec "$0" "$@"']
        words = words[3:]
    assert words == build_words(f"{project}/.venv/bin/python")
    # systemd.exec(5): a path as it stands, but for specifiers. systemd.syntax(7): a backslash at
    # the end joins lines, white space there is removed
    directory = find_line(service, "WorkingDirectory=")
    assert directory == directory.strip()
    assert not directory.endswith("\\")
    assert os.path.normpath(directory.replace("%%", "%")) == str(project)


def read_sbatch_words(line: str) -> list[str]:
    """Words of a line `#SBATCH`. Source: get_argument in slurm_opt.c and sbatch/opt.c."""
    words = list[str]()
    while line := line.lstrip():
        word, quote, escaped = "", "", False
        while line and (quote or not line[0].isspace()):  # also a blank behind a backslash
            character, line = line[0], line[1:]
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
                continue
            elif quote:
                if character == quote:
                    quote = ""
                    continue
            elif character in "\"'":
                quote = character
                continue
            elif character == "#":
                line = ""
                break
            word += character
        assert not quote, "Unmatched quote"
        words.append(word)
    return words


def expand_log(pattern: str, job: str) -> str:
    r"""sbatch(1), "filename pattern": `%j`, `%%`; where a `\` is, it is removed and no `%` is read.

    Source: remove_path_slashes and fname_create in fname.c.
    """
    if "\\" in pattern:
        return re.sub(r"\\(\\?)", r"\1", pattern)
    read = {"%%": "%", "%j": job}
    return re.sub("%.", lambda found: read[found[0]], pattern)


def test_a_job_of_slurm(project):
    sweep = load_scheduled_sweep(project, SLURM)
    directory = project / "jobs"
    directory.mkdir()
    command = ["python", "-c", "print(7)", str(project)]
    script = build_job_script(sweep, sweep.settings.backend, "a1", command, directory)
    (log,) = read_sbatch_words(find_line(script, "#SBATCH --output"))
    assert expand_log(log.removeprefix("="), "4711") == f"{directory}/log.txt"
    assert read_shell(script, "cd ")[1] == str(project)
    assert read_shell(script, "export PATH=")[1] == f"PATH={project}/.venv/bin:$PATH"
    assert read_shell(script, "rm -f ")[2] == f"{directory}/end;"
    trap = read_shell(script, "trap ")[1]
    step = script.partition('&& exec "$@"\' ')[2].partition(" \\\n")[0]
    for quoted in (trap.partition("cat ")[2].partition("/pid")[0], step):
        assert shlex.split(quoted) == [str(directory)]
    assert shlex.split(find_line(script, "    python").removesuffix(" &")) == command[1:]


def expand_kubernetes(word: str) -> str:
    """`$(NAME)` is replaced by a variable, `$$` read as `$`.

    Source: Kubernetes, "Define dependent environment variables"; expansion.Expand.
    """
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else "x", word)


def test_line_breaks_that_only_yaml_knows(tmp_path):
    """YAML 1.1, production 22: NEL, LS and PS are line breaks, which a quoted text folds."""
    sweep = load_scheduled_sweep(tmp_path, KUBERAY)
    words = ["python", "\x85 \u2028 \u2029 ü"]
    (job,) = read_manifests(build_ray_job(sweep, sweep.settings.backend, "a1", words))
    assert shlex.split(job["spec"]["entrypoint"])[3:] == words


@pytest.mark.parametrize("name", [*NAMES, "$(HOME)"], ids=[*IDS, "variable"])
def test_kubernetes(tmp_path, name):
    sweep = load_scheduled_sweep(tmp_path, KUBERAY)
    backend = sweep.settings.backend.model_copy(update={"working_dir": f"/srv/{name}"})
    sweep = replace(sweep, settings=sweep.settings.model_copy(update={"backend": backend}))
    (job,) = read_manifests(build_ray_job(sweep, backend, "a1", ["python", "-m", f"x/{name}"]))
    words = ["cd", f"/srv/{name}", "&&", "python", "-m", f"x/{name}"]
    assert shlex.split(job["spec"]["entrypoint"]) == words
    (text,) = render(sweep, "kuberay").values()
    (cron,) = [each for each in read_manifests(text) if each["kind"] == "CronJob"]
    (pod,) = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert pod["workingDir"] == f"/srv/{name}"
    command = [expand_kubernetes(word) for word in pod["command"]]
    assert command == build_words("python")
    archive = backend.model_copy(update={"working_dir": "s3://bucket/a: b #c.zip"})
    (job,) = read_manifests(build_ray_job(sweep, archive, "a1", ["python"]))
    environment = YAML(typ="safe").load(job["spec"]["runtimeEnvYAML"])
    assert environment == {"working_dir": "s3://bucket/a: b #c.zip"}

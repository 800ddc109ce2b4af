"""Schedules for other schedulers: short examples in full, what is left out, and what is refused."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime

import pytest
from ruamel.yaml import YAML

from gdpo_tune import schedule
from gdpo_tune.clusters.load_schedules import load_sweeps
from gdpo_tune.clusters.render import TARGETS
from gdpo_tune.clusters.render.base import list_unsupported
from gdpo_tune.core.errors import SpecError, UsageError
from tests.support.paths import ROOT
from tests.support.render import GOLDEN, KUBERAY, LOCAL, SLURM, render, render_nightly
from tests.support.schedule import load_scheduled_sweep

TEXT_OF = dict.fromkeys(("kuberay", "rayjob"), KUBERAY) | {"slurm": SLURM}
TEXT_OF |= dict.fromkeys(("systemd", "crontab"), LOCAL)


def documents(text: str) -> list[dict]:
    """YAML as Kubernetes reads it: by version 1.1."""
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)
    return list(yaml.load_all(text))


@pytest.mark.parametrize("example", [*TEXT_OF, "ray_cron_job"])
def test_examples_in_full(tmp_path, example):
    """The examples are in tests/data/rendered; users have applied such files."""
    options = {"ray_cron_job": True} if example == "ray_cron_job" else {}
    target = "kuberay" if options else example
    for name, found in render_nightly(tmp_path, TEXT_OF[target], target, **options).items():
        expected = GOLDEN / (f"ray_cron_job-{name}" if options else name)
        assert found == expected.read_text(), expected


def test_every_target_has_an_example():
    assert set(TEXT_OF) == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_every_limit_is_named_in_every_file(tmp_path, target):
    text = TEXT_OF[target].replace("gpu_hours: 80", "gpu_hours: 80, gpu_hours_per_30d: 500")
    text = text.replace("max_runtime: 10h", "max_runtime: 10h, max_attempts: 7")
    text += "notify: {webhook_env: HOOK}\n"
    for found in render_nightly(tmp_path, text, target).values():
        head = "\n".join(line for line in found.splitlines() if line.startswith("#"))
        for each in (
            "30 2 * * 1-5 in Europe/Berlin",
            "max_runtime 10h",
            "max_attempts 7",
            "budget.trials 60",
            "budget.gpu_hours 80",
            "budget.gpu_hours_per_30d 500",
            "notify by webhook",
        ):
            assert each in head


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_left_out_is_in_every_file(tmp_path, target):
    found = render(load_scheduled_sweep(tmp_path, TEXT_OF[target]), target)
    left_out = list_unsupported(found)
    assert left_out
    for text in found.values():
        for each in left_out:
            assert f"# Left out: {each}." in text


@pytest.mark.parametrize(
    ("target", "old", "new", "message"),
    [
        ("crontab", "missed_grace: 3h", "missed: skip", "CRON_TZ"),
        ("systemd", "missed_grace: 3h", "overlap: queue", "overlap queue: no second run"),
        ("systemd", "", "enabled: false\n", "leave the timer disabled"),
        ("systemd", "30 2", "30 2", "the run of 2026-03-30"),
        ("slurm", "missed_grace: 3h", "overlap: replace", "overlap replace: a time that comes"),
        ("slurm", "max_runtime: 10h, ", "", "that of the partition ends the job"),
        ("kuberay", "", "", "overlap skip: a time that comes during a run is made up for"),
        ("rayjob", "claim: sweeps", "cluster: shared", "backoffLimit needs a new cluster"),
    ],
)
def test_what_targets_leave_out(tmp_path, target, old, new, message):
    text = TEXT_OF[target]
    assert old in text
    text = text.replace(old, new) if old else text + new
    if "2026-03-30" in message:  # a Monday after the Sunday on which Berlin's clocks change
        text, message = text.replace("1-5", "*"), "the run of 2026-03-29: systemd skips"
    assert any(
        message in each
        for each in list_unsupported(render(load_scheduled_sweep(tmp_path, text), target))
    )


def test_a_schedule_outside_of_the_missing_hour_loses_no_run(tmp_path):
    text = LOCAL.replace("30 2 * * 1-5", "30 3 * * *")
    assert not any(
        "clocks" in each
        for each in list_unsupported(render(load_scheduled_sweep(tmp_path, text), "systemd"))
    )


def test_policies_reach_kubernetes(tmp_path):
    def spec(old: str, new: str) -> dict:
        (text,) = render_nightly(tmp_path, KUBERAY.replace(old, new), "kuberay").values()
        return documents(text)[-1]["spec"]

    found = spec("max_runtime", "max_runtime")
    assert found["concurrencyPolicy"] == "Forbid"
    assert found["startingDeadlineSeconds"] == 3 * 3600
    assert found["timeZone"] == "Europe/Berlin"
    assert "suspend" not in found
    assert spec("missed_grace: 3h", "missed: skip")["startingDeadlineSeconds"] == 600
    assert spec("missed_grace: 3h", "overlap: replace")["concurrencyPolicy"] == "Replace"
    assert spec("storage: /mnt", "enabled: false\nstorage: /mnt")["suspend"] is True


def test_policies_reach_a_ray_job(tmp_path):
    text = KUBERAY.replace("max_runtime: 10h", "max_runtime: 10h, max_attempts: 4")
    (found,) = render_nightly(tmp_path, text, "rayjob").values()
    spec = documents(found)[0]["spec"]
    assert spec["backoffLimit"] == 3
    assert spec["activeDeadlineSeconds"] == 11 * 3600
    assert spec["shutdownAfterJobFinishes"] is True
    assert "suspend" not in spec
    queued = text.replace("claim: sweeps", "claim: sweeps, queue: night")
    (document,) = documents(*render_nightly(tmp_path, queued, "rayjob").values())
    assert document["spec"]["suspend"] is True
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "night"


def test_a_ray_job_on_an_existing_cluster(tmp_path):
    text = KUBERAY.replace("claim: sweeps", "cluster: shared")
    spec = documents(*render_nightly(tmp_path, text, "rayjob").values())[0]["spec"]
    assert spec["clusterSelector"] == {"ray.io/cluster": "shared"}
    assert not {"rayClusterSpec", "backoffLimit", "shutdownAfterJobFinishes", "suspend"} & set(spec)


def test_a_project_in_an_archive(tmp_path):
    text = KUBERAY.replace("claim: sweeps", "claim: sweeps, working_dir: 's3://b/search.zip'")
    spec = documents(*render_nightly(tmp_path, text, "rayjob").values())[0]["spec"]
    assert spec["runtimeEnvYAML"] == "working_dir: s3://b/search.zip\n"
    assert spec["entrypoint"].startswith("python -m gdpo_tune.schedule ")
    with pytest.raises(SpecError, match="reads the file of the sweep from its image"):
        render_nightly(tmp_path, text, "kuberay")


def test_text_that_kubernetes_would_read_as_something_else(tmp_path):
    text = KUBERAY.replace("image: search:1", 'image: "on", secret: "no", service_account: "1e3"')
    container = documents(*render_nightly(tmp_path, text, "rayjob").values())[0]["spec"][
        "rayClusterSpec"
    ]
    pod = container["headGroupSpec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "on"
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "no"}}]
    assert pod["serviceAccountName"] == "1e3"


def test_paths_with_spaces_and_percents(tmp_path):
    folder = tmp_path / "100% mine $now"
    folder.mkdir()
    sweep = load_scheduled_sweep(folder, LOCAL)
    (crontab,) = render(sweep, "crontab").values()
    (line,) = [line for line in crontab.splitlines() if line.startswith("30 2")]
    command = line.split(" ", 5)[5].replace("\\%", "%")
    assert shlex.split(command)[:2] == ["cd", str(folder)]
    assert "%" not in line.replace("\\%", "")
    service = render(sweep, "systemd")["gdpo-nightly.service"]
    assert f"WorkingDirectory={tmp_path}/100%% mine $now\n" in service


REFUSED = {
    "no schedule": ("crontab", LOCAL, LOCAL.splitlines()[1], "", "crontab requires a schedule"),
    "a zone": ("systemd", LOCAL, "Europe/Berlin", "Factory", "systemd cannot express"),
    "a backend without an image": ("kuberay", LOCAL, "", "", "pods need an image"),
    "a backend without nodes": ("slurm", LOCAL, "", "", "slurm requires the number"),
    "the last day": ("kuberay", KUBERAY, "* * 1-5", "L * *", "L, LW and # are words"),
    "the second Monday": ("crontab", LOCAL, "* * 1-5", "* * 1#2", "L, LW and # are words"),
    "the last working day": ("systemd", LOCAL, "* * 1-5", "LW * *", "no last working day"),
    "a day of both kinds": ("systemd", LOCAL, "* * 1-5", "*/2 * 1#2", "nth of its week"),
    "every other day": ("kuberay", KUBERAY, "* * 1-5", "*/2 * 1", "means 'both' to cron"),
    "the same for Slurm": ("slurm", SLURM, "* * 1-5", "*/2 * 1", "means 'both' to cron"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_targets_refuse(tmp_path, case):
    target, text, old, new, message = REFUSED[case]
    sweep = load_scheduled_sweep(tmp_path, text.replace(old, new))
    with pytest.raises(SpecError) as caught:
        render(sweep, target)
    (problem,) = caught.value.problems
    assert problem.where == str(sweep.file)
    assert message in problem.reason
    assert caught.value.exit_status == 2


def test_versions_of_kuberay(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, KUBERAY)
    with pytest.raises(SpecError, match=r"KubeRay 1\.5 has no RayCronJob, which came with 1\.6"):
        render(sweep, "kuberay", kuberay=(1, 5), ray_cron_job=True)
    with pytest.raises(SpecError, match=r"RayCronJob of KubeRay 1\.6 has no time zone"):
        render(sweep, "kuberay", kuberay=(1, 6), ray_cron_job=True)
    with pytest.raises(SpecError, match=r"KubeRay 1\.1 does not know backoffLimit"):
        render(sweep, "rayjob", kuberay=(1, 1))
    queued = load_scheduled_sweep(
        tmp_path, KUBERAY.replace("claim: sweeps", "claim: sweeps, queue: night")
    )
    with pytest.raises(SpecError, match="the label by which Kueue knows them"):
        render(queued, "kuberay", ray_cron_job=True)
    in_utc = load_scheduled_sweep(tmp_path, KUBERAY.replace("Europe/Berlin", "UTC"))
    found = render(in_utc, "kuberay", kuberay=(1, 6), ray_cron_job=True)
    (document,) = documents(*found.values())
    assert "timeZone" not in document["spec"]
    assert any("the operator's clock is used" in each for each in list_unsupported(found))
    assert "jobTemplate" in document["spec"]


def call(folder, *words: str) -> int:
    return schedule.main([str(folder / "sweeps"), "render", *words])


def test_the_command_prints_or_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(schedule, "read_clock", lambda: datetime(2026, 1, 1, tzinfo=UTC))
    load_scheduled_sweep(tmp_path, LOCAL)
    assert call(tmp_path, "--to", "systemd") == 0
    printed = capsys.readouterr()
    assert printed.out.count("# gdpo-nightly.") == 2
    assert "nightly: left out: missed_grace" in printed.err
    assert call(tmp_path, "--to", "systemd", "--out", str(tmp_path / "units")) == 0
    printed = capsys.readouterr()
    names = ["gdpo-nightly.service", "gdpo-nightly.timer"]
    assert printed.out.splitlines() == [str(tmp_path / "units" / name) for name in names]
    assert "OnCalendar=" in (tmp_path / "units" / names[1]).read_text()


def test_several_manifests_make_one_stream(tmp_path, capsys):
    load_scheduled_sweep(tmp_path, KUBERAY)
    load_scheduled_sweep(tmp_path, KUBERAY, "weekly")
    assert call(tmp_path, "--to", "rayjob") == 0
    names = [each["metadata"]["generateName"] for each in documents(capsys.readouterr().out)]
    assert names == ["nightly-", "weekly-"]


def test_what_fits_is_rendered_and_the_rest_is_named(tmp_path, capsys):
    load_scheduled_sweep(tmp_path, LOCAL)
    load_scheduled_sweep(tmp_path, KUBERAY, "weekly")
    assert call(tmp_path, "--to", "kuberay") == 0
    printed = capsys.readouterr()
    assert {each["metadata"]["name"] for each in documents(printed.out)} >= {"weekly"}
    (line,) = [line for line in printed.err.splitlines() if line.startswith("not rendered: ")]
    assert f"{tmp_path}/sweeps/nightly.yaml: backend.kind = local: pods need an image" in line
    # another refusal is one of a sweep that is for this target
    load_scheduled_sweep(tmp_path, KUBERAY.replace("* * 1-5", "L * *"), "monthly")
    with pytest.raises(SpecError, match="L, LW and # are words"):
        call(tmp_path, "--to", "kuberay")
    (tmp_path / "sweeps" / "monthly.yaml").write_text("space: nowhere.yaml\n")
    with pytest.raises(SpecError, match="there is no file nowhere"):
        call(tmp_path, "--to", "kuberay")


def test_every_problem_of_all_sweeps_at_once(tmp_path):
    load_scheduled_sweep(tmp_path, LOCAL)
    load_scheduled_sweep(tmp_path, LOCAL, "weekly")
    with pytest.raises(SpecError) as caught:
        call(tmp_path, "--to", "slurm")
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "kubray"), "invalid choice: 'kubray'"),
        ((), "required: --to"),
        (("--to", "kuberay", "--kuberay", "new"), "'new' is not a version"),
    ],
)
def test_wrong_arguments(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        call(tmp_path, *words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_option_for_another_target(tmp_path):
    load_scheduled_sweep(tmp_path, LOCAL)
    with pytest.raises(UsageError, match="--ray-cron-job is for --to kuberay"):
        call(tmp_path, "--to", "crontab", "--ray-cron-job")
    with pytest.raises(UsageError, match="--kuberay is for --to kuberay and rayjob"):
        call(tmp_path, "--to", "systemd", "--kuberay", "1.5")


def test_a_directory_that_cannot_be_written(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, LOCAL)
    for place in (sweep.file, sweep.file / "below", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match="cannot be written"):
            call(tmp_path, "--to", "systemd", "--out", str(place))


SHIPPED = {
    "nightly_code.yaml": ["crontab", "systemd"],
    "weekly_math.yaml": ["crontab", "systemd"],
    "kuberay_code.yaml": ["kuberay", "rayjob", "systemd", "crontab"],
    "slurm_math.yaml": ["slurm", "systemd", "crontab"],
}


@pytest.mark.parametrize("file", SHIPPED)
def test_shipped_sweeps_are_rendered(file):
    loaded = load_sweeps(ROOT / "sweeps" / file)
    assert loaded.error is None
    (sweep,) = loaded.sweeps
    for target in SHIPPED[file]:
        for name, text in render(sweep, target).items():
            assert text.splitlines()[text.startswith("#!")].startswith(
                f"# {name}: {sweep.settings.space}"
            )


def test_every_shipped_sweep_is_rendered():
    assert {path.name for path in (ROOT / "sweeps").glob("*.yaml")} == set(SHIPPED)
    assert {target for targets in SHIPPED.values() for target in targets} == set(TARGETS)

"""Files that let another scheduler tick: what they hold, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from gdpo_tune import schedule
from gdpo_tune.clusters import TARGETS
from gdpo_tune.clusters.load_schedules import load_sweeps
from gdpo_tune.clusters.render import render_ticker
from gdpo_tune.core.errors import SpecError, UsageError
from tests.support.paths import ROOT
from tests.support.render import KUBERAY, LOCAL, SLURM
from tests.support.schedule import load_scheduled_sweep

SWEEPS = {"systemd": LOCAL, "crontab": LOCAL, "slurm": SLURM, "kuberay": KUBERAY}


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_ticks_the_directory_every_five_minutes(tmp_path, target):
    project = tmp_path / "My search"
    sweep = load_scheduled_sweep(project, SWEEPS[target])
    files = render_ticker([sweep], str(sweep.file.parent), target)
    assert tuple(files) == tuple(f"gdpo-tune-my-search.{each}" for each in TARGETS[target])
    text = "".join(files.values()).replace(", ", " ")
    assert "-m gdpo_tune.schedule sweeps tick" in text
    assert "/5" in text
    (file,) = render_ticker([sweep], str(sweep.file), target).keys() & {
        f"gdpo-tune-nightly.{TARGETS[target][0]}"
    }
    assert file


def test_the_pod_of_kubernetes_may_do_what_a_tick_needs(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, KUBERAY)
    (text,) = render_ticker([sweep], str(sweep.file.parent), "kuberay").values()
    documents = {each["kind"]: each for each in YAML(typ="safe").load_all(text)}
    assert documents["Role"]["rules"][0]["verbs"] == ["create", "get", "delete"]
    pod = documents["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == documents["ServiceAccount"]["metadata"]["name"]
    assert pod["containers"][0]["image"] == "search:1"
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == sweep.storage
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "sweeps"}


@pytest.mark.parametrize(
    ("target", "old", "new", "message"),
    [
        ("kuberay", KUBERAY, LOCAL, "backend.kind.*a pod ticks only sweeps of kuberay"),
        ("kuberay", "claim: sweeps", "cluster: c", "backend.claim.*would lose the state"),
        ("kuberay", "claim", "working_dir: s3://b/a.zip, claim", "working_dir.*from an archive"),
        ("slurm", KUBERAY, LOCAL, "backend.kind.*would end with the job of Slurm that ticks"),
    ],
)
def test_what_targets_refuse(tmp_path, target, old, new, message):
    sweep = load_scheduled_sweep(tmp_path, KUBERAY.replace(old, new))
    with pytest.raises(SpecError, match=message):
        render_ticker([sweep], str(sweep.file), target)


def test_sweeps_of_different_pods_are_all_named(tmp_path):
    sweep = load_scheduled_sweep(tmp_path, KUBERAY)
    backend = sweep.settings.backend.model_copy(update={"image": "other:2", "secret": "s"})
    second = replace(sweep, settings=sweep.settings.model_copy(update={"backend": backend}))
    with pytest.raises(SpecError, match="one pod ticks all files") as found:
        render_ticker([sweep, second], str(sweep.file.parent), "kuberay")
    assert [each.key for each in found.value.problems] == ["backend.image", "backend.secret"]


def test_the_command_prints_or_writes(tmp_path, capsys, monkeypatch):
    sweep = load_scheduled_sweep(tmp_path, LOCAL)
    monkeypatch.chdir(tmp_path)
    assert schedule.main(["sweeps", "render", "--to", "crontab"]) == 0
    printed = capsys.readouterr().out
    assert schedule.main([str(sweep.file), "render", "--to", "systemd", "--out", "units"]) == 0
    names = [Path("units", f"gdpo-tune-nightly.{each}") for each in ("service", "timer")]
    assert capsys.readouterr().out.split() == [str(name) for name in names]
    assert "-m gdpo_tune.schedule sweeps/nightly.yaml tick" in names[0].read_text()
    assert "-m gdpo_tune.schedule sweeps tick" in printed
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/x cannot be written"):
        schedule.main(["sweeps", "render", "--to", "crontab", "--out", "file/x"])


@pytest.mark.parametrize("named", [True, False])
def test_the_job_that_ticks_is_in_the_partition_and_account_of_the_file(tmp_path, named):
    """scrontab(1): options as of sbatch, in lines of #SCRON."""
    text = SLURM.replace("partition: gpu", "partition: gpu, account: rl" if named else "setup: x")
    sweep = load_scheduled_sweep(tmp_path, text)
    (lines,) = render_ticker([sweep], str(sweep.file), "slurm").values()
    options = [line for line in lines.splitlines() if line.startswith("#SCRON")]
    assert ("#SCRON --partition=gpu" in options) == named
    assert ("#SCRON --account=rl" in options) == named


def test_a_target_that_is_gone_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        schedule.main(["sweeps", "render", "--to", "rayjob"])
    assert "choose from systemd, crontab, slurm, kuberay" in capsys.readouterr().err


@pytest.mark.parametrize("name", [each.name for each in (ROOT / "sweeps").glob("*.yaml")])
def test_shipped_sweeps_are_rendered(name):
    file = ROOT / "sweeps" / name
    loaded = load_sweeps(file)
    kind = loaded.sweeps[0].settings.backend.kind
    target = kind if kind in TARGETS else "systemd"
    assert render_ticker(loaded.sweeps, str(file), target)

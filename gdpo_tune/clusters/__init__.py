"""Scheduled sweeps: when and where they run, by the files of `sweeps/`.

schedule_spec       the keys of a file, and fire times of a cron expression
load_schedules      the files as frozen models, or every problem in them at once
schedule_state      the state of a schedule: one locked JSON file beside its sweeps
scheduler           what a schedule does next; runs that a person starts; notices by webhook
outcome             the figures of a run
backends            what runs the command of a sweep: this machine, Ray, KubeRay, Slurm
render              what calls `tick`: files of systemd, cron, Slurm, Kubernetes
"""

TARGETS = {
    "systemd": ("service", "timer"),
    "crontab": ("crontab",),
    "slurm": ("scrontab",),
    "kuberay": ("yaml",),
}
"""Name -> endings of its files: units of a user for `~/.config/systemd/user`, a line for `crontab
-e`, a line for `scrontab -e`, and a CronJob of Kubernetes with the rights that it needs."""

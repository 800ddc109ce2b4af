"""Scheduled sweeps: when and where they run, by the files of `sweeps/`.

schedule_spec       the keys of a file, and fire times of a cron expression
load_schedules      the files as frozen models, or every problem in them at once
schedule_state      the state of a schedule: one file per change, beside its sweeps
scheduler           what a schedule does next; runs that a person starts; notices by webhook
outcome             the figures of a run
backends            what runs the command of a sweep: this machine, Ray, KubeRay, Slurm
render              the schedule in the files of another scheduler
"""

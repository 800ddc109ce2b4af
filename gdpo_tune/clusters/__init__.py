"""Scheduled sweeps: when and where they run, by the files of `sweeps/`.

    load_schedules      the files as frozen models, or every problem in them at once
    cron                fire times of a cron expression in a time zone
    schedule_state      the state of a schedule: one file per change, beside its sweeps
    scheduler           what a schedule does next; runs that a person starts; notices by webhook
    outcome             the figures of a run
    backends            what runs the command of a sweep: this machine, Ray, KubeRay, Slurm
    render              the schedule in the files of another scheduler

There is no other state. Every process that calls `tick` sees the same runs and takes the same
decisions. If two processes write at once, one fails, reads the new state and decides again.
"""

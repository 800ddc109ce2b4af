"""Scheduled sweeps: when and where they run, by the files of `sweeps/`.

    load_schedules      the files as frozen models, or every problem in them at once
    cron                the instants that a cron line means in a time zone
    schedule_state      the state of a schedule: one file per change, beside its sweeps
    schedule_decisions  what a schedule does next
    tick, named_runs    carry decisions out, by the schedule and by name
    outcome, notify     the figures of a run, and their notification by webhook
    backends            what runs the command of a sweep: this machine, Ray, KubeRay, Slurm
    render              the schedule in the files of another scheduler

There is no other state. Every process that calls `tick` sees the same runs and takes the same
decisions. If two processes write at once, one fails, reads the new state and decides again.
"""

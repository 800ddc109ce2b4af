"""A sweep's schedule for another scheduler: what it is to run, and when, in its own language.

    names      the targets, by name
    targets    what one of them makes of sweeps, or every problem at once
    base       what every target is given, what it gives back, and what all of them refuse
    cron_line  a cron line as other schedulers read it
    crontab, systemd, slurm, kuberay, ray_job: one target each

Each lets its scheduler call `run NAME --wait`, so that history, attempts, budgets and webhook are
those of any other run; what it cannot express is said in the file.
"""

"""When and where sweeps run: the files of `sweeps/`, their history, and the machines that work.

    load        the files as frozen models, or every problem in them at once
    cron        the instants that a cron line means in a time zone
    store, log  the history: numbered events, each created once, beside the sweeps that it is about
    shapes      what each kind of event says; what was damaged or forged is refused by it
    book        what the events add up to: runs, their attempts, what was skipped, what was spent
    decide      the next event, by pure functions of file, book and clock
    tick        carries decisions out, on a backend
    asking      the same for runs that somebody asks for by name
    backends    by name, what runs the command of a sweep: this machine, Ray, KubeRay, Slurm
    notify      a webhook hears how runs end
    render      the schedule for another scheduler
    submit      one sweep as a job of a Ray cluster, without a schedule

No state but the history: whoever calls `tick`, from wherever, sees the same runs and takes the same
decisions, and of two at once one is too late with each event, looks again and decides anew.
"""

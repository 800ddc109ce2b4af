from gdpo_tune.clusters.scheduler import Scheduler, build_job
tick = Scheduler.tick

import time
from gdpo_tune.clusters.scheduler import Scheduler
from gdpo_tune.clusters import scheduler as _s
choose_due_time, run_by_name, stop_by_name = Scheduler.choose_due_time, Scheduler.run, Scheduler.stop

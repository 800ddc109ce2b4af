from gdpo_tune.clusters.scheduler import *
from gdpo_tune.clusters.scheduler import ON_TIME, Clock, Scheduler as ScheduleContext
open_context = ScheduleContext.open

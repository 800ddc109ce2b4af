"""An MLflow in memory, behind the methods of `MlflowClient` that tracking calls."""

import itertools
from types import SimpleNamespace

from mlflow.entities import Metric, Param, Run, RunData, RunInfo, RunInputs, RunTag, ViewType
from mlflow.exceptions import MlflowException

REFUSED = 1000  # INVALID_PARAMETER_VALUE


class FakeMlflow:
    """Runs by id, and every point that was stored. `fail` is called before each request."""

    def __init__(self):
        self.runs, self.experiment_tags, self.versions, self.files = {}, {}, {}, []
        self.deleted = {}
        """Runs that are deleted, which MLflow keeps."""
        self.refused_keys = set()
        """Keys of points, params and tags whose batch is refused."""
        self.requests, self.fail = [], lambda method, *arguments: None
        self._ids = itertools.count(1)

    def __call__(self, tracking_uri, registry_uri):
        return self

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        if name[0] == "_" or not callable(found) or name in ("fail", "by_key"):
            return found

        def request(*arguments, **options):
            self.fail(name, *arguments)
            self.requests.append((name, *arguments))
            return found(*arguments, **options)

        return request

    def by_key(self):
        """Return the runs that exist by `sweep` or trial number."""
        return {run.tags.get("trial", "sweep"): run for run in self.runs.values()}

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="1", lifecycle_stage="active")

    def get_experiment(self, experiment):
        return SimpleNamespace(tags=self.experiment_tags)

    def set_experiment_tag(self, experiment, name, text):
        self.experiment_tags[name] = text

    def create_run(self, experiment, start=None, tags=None, run_name=None):
        id = f"r{next(self._ids)}"
        run = {"id": id, "name": run_name, "start": start or 1, "end": None, "tags": dict(tags)}
        run |= {"status": "RUNNING", "statuses": ["RUNNING"], "params": {}, "points": []}
        self.runs[id] = SimpleNamespace(**run, inputs=[])
        return self._build_run(id)

    def delete_run(self, id):
        self.deleted[id] = self.runs.pop(id)

    def search_runs(self, experiments, query, view, max_results, order_by, page_token):
        parent = query.rpartition("'mlflow.")[0] or query
        wanted = [
            run
            for run in (self.runs | self.deleted).values()
            if ("tags.role" in query) == (run.tags.get("role") == "sweep")
            and ("tags.role" in query or run.tags["mlflow.parentRunId"] in parent)
        ]
        assert view == ViewType.ALL
        page = [self._build_run(run.id) for run in wanted]
        return type("Page", (list,), {"token": ""})(page)

    def log_batch(self, id, metrics=(), params=(), tags=()):
        if id in self.deleted:
            raise MlflowException("The run must be in the 'active' state", REFUSED)
        run = self.runs[id]
        if self.refused_keys & {each.key for each in (*metrics, *params, *tags)}:
            raise MlflowException("not this one", REFUSED)
        for metric in metrics:
            point = (metric.key, metric.value, metric.timestamp, metric.step)
            run.points += [] if point in run.points else [point]
        for param in params:
            if run.params.setdefault(param.key, param.value) != param.value:
                raise MlflowException("changed", REFUSED)
        run.tags |= {tag.key: tag.value for tag in tags}
        run.name = run.tags.get("mlflow.runName", run.name)

    def set_tag(self, id, name, text):
        self.runs[id].tags[name] = text

    def log_inputs(self, id, inputs):
        self.runs[id].inputs += inputs

    def update_run(self, id, status):
        self.runs[id].status = status
        self.runs[id].statuses.append(status)

    def set_terminated(self, id, status, end):
        self.update_run(id, status)
        self.runs[id].end = end

    def log_text(self, id, text, name):
        self.files.append((self.runs[id].tags.get("trial", "sweep"), name))

    def log_artifact(self, id, path):
        self.files.append((self.runs[id].tags.get("trial", "sweep"), path.rpartition("/")[2]))

    def search_registered_models(self, query):
        return [True]

    def search_model_versions(self, query):
        return list(self.versions.values())

    def create_model_version(self, name, source, run_id, tags, await_creation_for):
        number = max(self.versions, default=0) + 1
        version = SimpleNamespace(run_id=run_id, tags=dict(tags), version=number)
        self.versions[version.version] = version
        return version

    def delete_model_version(self, name, version):
        del self.versions[version]

    def set_registered_model_alias(self, name, alias, number):
        pass

    def _build_run(self, id):
        run = (self.runs | self.deleted)[id]
        latest = {}
        for name, value, when, step in sorted(run.points, key=lambda p: (p[3], p[2], p[1])):
            latest[name] = Metric(name, value, when, step)
        params = [Param(*item) for item in run.params.items()]
        data = RunData([*latest.values()], params, [RunTag(*item) for item in run.tags.items()])
        stage = "deleted" if id in self.deleted else "active"
        info = RunInfo(id, "1", "me", run.status, run.start, run.end, stage)
        return Run(info, data, RunInputs(dataset_inputs=list(run.inputs)))

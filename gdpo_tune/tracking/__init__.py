"""Listeners that report a sweep elsewhere: to MLflow, other trackers, and the webhook of `notify:`.

Neither ever delays the sweep.
"""

"""Listeners that report a sweep elsewhere: to MLflow, and to the webhook of `notify:`.

Neither ever delays the sweep.
"""

"""A training, or a merge, as the configuration of another library: one file per library.

Each exporter is a function `export_NAME(setup) -> Exported`, named in `registry.EXPORTERS`. It
raises `ExportError` for what its library would change or ignore, every reason at once. What the
library computes differently is in `differences.md`.
"""

"""A training, or a merge, as the configuration of another library: one file per library.

Each exporter is a function `export_NAME(setup) -> Exported`, named in `registry.EXPORTERS`. It raises
`ExportError` for what its library would change or ignore, every reason at once, and lists what the
library does differently.
"""

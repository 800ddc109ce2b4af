"""A training as it is to be repeated in another library: one file a library.

Each exporter is a function `export(recipe) -> Exported`, named in `registry.EXPORTERS`. What its
library would change or ignore it refuses, every reason at once; what the library does differently
it says, row by row.
"""

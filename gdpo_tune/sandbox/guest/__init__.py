"""Code of the sandbox's own processes: the zygote and its locked forks.

These modules import nothing but the standard library and each other, because the processes
load this directory alone, without the rest of the package.
"""

"""Parts of the programs of an export, which `bundle` copies from here.

`judging` gives the rewards of completions; one module per library gives them in its form. Values in
capitals are those of no training: `reward_file` replaces them.
"""

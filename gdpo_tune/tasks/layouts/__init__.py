"""Layouts of known data sets, one file each: a pure function of a row, and its `LAYOUT`.

The function raises `RowError` for a row that cannot become a problem: a column is missing or not of
its kind, there is no test, or the answer cannot be parsed.

`Problem.data` is what the tasks agree on: for `math` and `gsm8k` `{"answer": text}`; for `tools`
`{"calls": [{"name", "parameters"}], "response": bool}`; for `code` see `code_tests`.
"""

"""How rows of known data sets become problems: one file a layout, one pure function of a row each.

`Problem.data` is what the tasks agree on: of `math` and `gsm8k` `{"answer": text}`; of `tools`
`{"calls": [{"name", "parameters"}], "response": bool}`; of `code` see `code_tests`.
"""

"""The contract tried out: tiny runs that a plugin, ours or a stranger's, is put through.

`check` holds the promises, `tiny` the runs, `resume` those stopped on the way, `process` what must
be as found afterwards, `skeleton` the package that `gptfast plugins new` begins.
"""

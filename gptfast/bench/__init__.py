"""Measures what each plugin brings on this machine, and whether it changed what is learnt.

- `messages` what a worker answers
- `worker` the process of one rung: a trainer that advances when told to
- `process` the other end of its pipes
- `statistics` warm-up, ratios, drift, claims: arithmetic alone
- `record` the result, which is the JSON
- `ladder` which rungs there are, and measuring them
- `table` the result as rows
"""

"""What was found.

- `statistics` warm-up, ratios, drift, claims: arithmetic alone
- `record` what is the JSON, and reading it back
- `rows` from what the rungs did to the rows
- `compare` two results; `published` ladders of others
- `table`, `pictures` the result as text and as bars
"""

"""Measures what each plugin brings on this machine, and whether it changed what was learnt.

A worker process, from the inside out:

- `rung` what is advanced in laps: a trainer, or the loop of `bare`, written by hand
- `phases` where the time of a step goes
- `gauge` how fast the device multiplies at best
- `conditions` load, clocks and temperatures; what other programs take
- `messages` what a worker answers
- `worker` the process
- `process` the other end of its pipes

The measurement:

- `attempt` one rung from the start of its process to its last round
- `sitting` which rungs stand at the same time, and whose turn it is
- `ladder` which rungs there are
- `overhead` what the machinery costs
- `tune` the search for the fastest profile, by `moves` that it may make before a `deadline`, each
  taken or not by `decide`
- `to_loss` how soon recipes reach a loss
- `statistics` warm-up, ratios, drift, claims: arithmetic alone

The result:

- `record` what is the JSON, and reading it back
- `rows` from what the rungs did to the rows
- `compare` two results
- `published` ladders of others
- `table`, `pictures` the result as text and as bars
- `tuned` what the search found, and the profile that it writes
- `to_loss_record`, `to_loss_table` the race as JSON and as text
"""

"""One rung in a process of its own, and its turns with the others.

A worker process, from the inside out:

- `rung` what is advanced in laps: a trainer, or the loop of `bare`, written by hand
- `phases` where the time of a step goes
- `gauge` how fast the device multiplies at best
- `conditions` load, clocks and temperatures; what other programs take
- `messages` what a worker answers
- `worker` the process; `process` the other end of its pipes

The measurement:

- `attempt` one rung from the start of its process to its last round; before a `deadline`, if any
- `sitting` which rungs stand at the same time, and whose turn it is
"""

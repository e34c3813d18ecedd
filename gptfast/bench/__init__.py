"""Measures what each plugin brings on this machine, and whether it changed what was learnt.

- `measure` one rung in a process of its own, and its turns with the others
- `ladder` which rungs there are; `overhead` what the machinery costs
- `result` what was found: statistics, record, tables, pictures, comparison
- `race` how soon recipes reach a loss
- `tune` the search for the fastest profile
"""

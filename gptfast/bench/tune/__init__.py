"""The search for the fastest form of a profile on this machine.

- `tune` the search, by `moves` that it may make, each taken or not by `decide`
- `tuned` what it found, and the profile that it writes
"""

"""The machine: what it is, its memory, this process's place in it, its random state."""

"""The shipped optimizations, one file each."""

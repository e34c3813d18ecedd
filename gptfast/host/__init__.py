"""The plugins' host.

- `registry` finds plugins, checks, orders, asks the machine
- `hooks` calls the hooks: folds, owns, surrounds, asks, names the culprit
- `payback` after how many steps a plugin's start has paid here; `answers` where that is kept
"""

"""A training run: built, advanced, saved, resumed, evaluated, sampled.

- `session` from a profile to a running trainer: machine, data, folder, `signals`
- `assembly` the parts of a run, built and resumed in the order of the contract
- `trainer` the only loop there is; `metrics` what it logs
- `checkpoint` one checkpoint on disk; `folder` a run's folder; `provenance` what repeats it
- `restore` from a run's folder to a model that `evaluate` scores and `generate` writes with
- `fit` the micro-batch that memory has room for; `verify_resume` does this profile resume exactly
"""

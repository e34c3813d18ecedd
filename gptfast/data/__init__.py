"""From text to windows: sources -> tokenizer -> store (HDF5) -> windows (a pure order).

The text:

- `sources` what can be named; `corpora`, `shakespeare` and `hub` what is not on this machine, which
  `fetch` brings
- `packing`, `formats` from files to documents; `corpus` looks through them and cuts them up
- `selection` how much of which text is taken: `mix` by weight, `dedupe` without copies, `plan` for
  training or validation

Its ids:

- `tokenizer`, one kind a module in `vocabularies`; `encoding` on threads
- `prepare` the whole way; `job` and `journal` so that another goes on where it was killed
- `writer` makes the file; `disk` looks for room and makes it certain

The file:

- `layout` what it says about itself; `store` reads it; `foreign` and `nanogpt_meta` those of others
- `inspection`, `verify` what is in it; `convert`, `export` into ours and out of it
- `windows` which tokens a step sees; `batches` brings them
- `wording` how counts are told
"""

"""Makes a data file: text sources -> documents -> ids -> an HDF5 file.

The text:

- `sources` what can be named; `corpora`, `shakespeare` and `hub` what is not on this machine, which
  `fetch` brings
- `packing`, `formats` from files to documents; `corpus` looks through them and cuts them up
- `selection` how much of which text is taken, in a mix by weight: `dedupe` without copies, `plan`
  for training or validation

The file:

- `prepare` the whole way; `encoding` on threads
- `progress` so that another goes on where it was killed
- `writer` makes the file
"""

"""Rounds the rows of embedding and head up to a multiple that matrix kernels like.

What: GPT-2's 50,257 rows become 50,304 (124,475,904 parameters instead of 124,439,808). The model
cuts the columns of the extra rows off before the softmax, so they are never predicted or sampled
and get no gradient; they start at zero and draw no random number.
Helps: GPUs, whose tensor cores want rows in multiples of 64 or 128; most where the vocabulary is
odd and the head is a large share of the work.
Costs: up to `multiple - 1` rows of memory; slightly slower where the vocabulary is small. A
checkpoint keeps the padded shape: continue it with this plugin on.
Claim: exact. The function and its gradient are the same; a matrix library may add in another
order for another number of rows. Measured on a CPU over 20 steps: equal bits with vocabularies of
61, 65, 257 and 50,257, a difference of 7e-8 with 1,000; hence the tolerance of 1e-6.
Source: Karpathy 2023, https://github.com/karpathy/nanoGPT/pull/86
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from gptfast.plugin import Claim, Options, Plugin, Profile, Stage, Tries


def padded(rows: int, multiple: int) -> int:
    """`rows` rounded up: `padded(50_257, 128)` is 50,304."""
    return -(-rows // multiple) * multiple


def _power_of_two(multiple: int) -> int:
    if multiple < 8 or multiple & (multiple - 1):
        raise ValueError(f"multiple = {multiple} must be a power of two from 8: use 64 or 128")
    return multiple


class VocabPadOptions(Options):
    multiple: Annotated[int, AfterValidator(_power_of_two)] = 128
    """Rows become a multiple of this: a power of two from 8."""


class VocabPad(Plugin):
    summary = "Rows of embedding and head rounded up to a multiple of a power of two"
    stage = Stage.SURGERY
    claim = Claim.EXACT
    tolerance = 1e-6
    tries = Tries(multiple=(64, 128))
    Options = VocabPadOptions

    def configure(self, profile: Profile) -> Profile:
        rows = padded(profile.model.vocab_rows, self.options.multiple)
        return profile.replace({"model.padded_vocab_size": rows})

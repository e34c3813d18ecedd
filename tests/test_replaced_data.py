"""A data file that is replaced under a run is another run's: this one reads on in its own."""

from __future__ import annotations

from pathlib import Path

from gptfast.config import load
from gptfast.data.prepare.prepare import PrepareOptions, prepare
from gptfast.report import Finished, RunInfo, Silent
from gptfast.run import session

PROFILE = """
[model]
n_layer = 1
n_head = 1
n_embd = 8
block_size = 8
[data]
path = "corpus.h5"
[train]
steps = 6
batch_size = 2
eval_interval = 3
sample_tokens = 4
"""


class Replaces(Silent):
    """Has another text prepared under the same name as soon as the run stands."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def started(self, info: RunInfo) -> None:
        other = self.data.with_name("other.txt")
        other.write_text("0123456789" * 50)
        prepare([other], PrepareOptions("chars", force=True), out=self.data)


def finished(folder: Path, listener: Silent, run: str) -> Finished:
    loaded = load(config=folder / "gptfast.toml", folder=folder)
    return session.train(loaded, run=run, device="cpu", folder=folder, listener=listener)


def test_a_run_reads_on_in_the_file_that_it_began_with(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 30)
    data = tmp_path / "corpus.h5"
    (tmp_path / "gptfast.toml").write_text(PROFILE)
    prepare([text], PrepareOptions("chars"), out=data)
    undisturbed = finished(tmp_path, Silent(), "one")
    before = data.stat().st_ino
    replaced = finished(tmp_path, Replaces(data), "two")
    assert data.stat().st_ino != before
    assert (replaced.loss, replaced.val_loss) == (undisturbed.loss, undisturbed.val_loss)
    assert replaced.steps == 6

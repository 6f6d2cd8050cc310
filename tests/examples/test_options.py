"""The example's options and texts: what cannot be is refused, and any text is read."""

import numpy as np
import pytest
import text
from options import parse

IMPOSSIBLE = [
    "--width=48", "--steps=0", "--qk-clip=0", "--compare=adamw", "--compare=a,b",
    "--compare=adamw,adamw", "--seed=4294967296", "--learning-rate=-1",
    "--optimizer=adamw --momentum=1.5", "--sharding=hsdp --mesh=8",
    "--sharding=fsdp --mesh=4,2", "--devices=2",
]  # fmt: skip


@pytest.mark.parametrize("flags", IMPOSSIBLE)
def test_impossible_options_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        parse(flags.split(), None)
    assert "expected" in capsys.readouterr().err


def test_any_text_can_be_read_and_batches_depend_on_seed_and_step_alone(tmp_path):
    path = tmp_path / "süß.txt"
    path.write_text("äöü ßé\n" * 300 + "東京" * 20, encoding="utf-8")
    data = text.read_text(str(path), context=32)
    assert data.train.size + data.validation.size == 2140
    assert data.vocabulary == text.UNKNOWN + "\n ßäéöü"
    assert data.decode(data.train[:7]) == "äöü ßé\n"
    assert data.decode(data.validation[-2:]) == 2 * text.UNKNOWN
    batch = data.batch(0, 7, 4, 32)
    assert batch.shape == (4, 33)
    np.testing.assert_array_equal(batch, data.batch(0, 7, 4, 32))
    assert (batch != data.batch(0, 8, 4, 32)).any()
    assert (batch != data.batch(1, 7, 4, 32)).any()

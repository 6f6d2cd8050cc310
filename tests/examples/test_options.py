"""The example's options: what cannot be is refused in words."""

import pytest
from options import parse

IMPOSSIBLE = [
    "--width=48", "--steps=0", "--qk-clip=0", "--compare=adamw", "--compare=a,b",
    "--compare=adamw,adamw", "--seed=-1", "--seed=4294967296", "--learning-rate=-1",
    "--adamw-learning-rate=nan", "--weight-decay=inf", "--embedding-factor=-1",
    "--optimizer=adamw --momentum=1.5", "--sharding=hsdp --mesh=8",
    "--sharding=fsdp --mesh=4,2", "--devices=2",
]  # fmt: skip


@pytest.mark.parametrize("flags", IMPOSSIBLE)
def test_impossible_options_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        parse(flags.split(), None)
    assert "expected" in capsys.readouterr().err

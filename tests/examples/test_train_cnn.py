"""The convolutional example reaches what it promises."""

import train_cnn


def test_reads_digits(capsys):
    assert train_cnn.main(["--epochs=4"]) > 0.95
    assert "1 x (576, 64)   muon" in capsys.readouterr().out

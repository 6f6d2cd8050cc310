"""The example's texts: any can be read, and batches depend on seed and step alone."""

import numpy as np
import text


def test_any_text_can_be_read(tmp_path):
    path = tmp_path / "süß.txt"
    path.write_text("äöü ßé\n" * 300 + "東京" * 20, encoding="utf-8")
    data = text.read_text(str(path), context=32)
    assert data.train.size + data.validation.size == 2140
    assert data.vocabulary == text.UNKNOWN + "\n ßäéöü"
    assert data.decode(data.train[:7]) == "äöü ßé\n"
    assert data.decode(data.validation[-2:]) == 2 * text.UNKNOWN
    assert "40 of them unknown" in str(data)


def test_batches_depend_on_seed_and_step_alone():
    data = text.read_text(None, context=32)
    batch = data.batch(0, 7, 4, 32)
    assert batch.shape == (4, 33)
    np.testing.assert_array_equal(batch, data.batch(0, 7, 4, 32))
    assert (batch != data.batch(0, 8, 4, 32)).any()
    assert (batch != data.batch(1, 7, 4, 32)).any()

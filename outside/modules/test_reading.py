"""Models of these packages, read by their losses: no leaf is wrong."""

import pytest

from outside import reading


@pytest.mark.parametrize("model", reading.models("modules"))
def test_no_leaf_is_wrong(model):
    reading.check(model)

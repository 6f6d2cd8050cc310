"""The small programs in plain JAX that the tests read too."""

import re

from benchmarks.reading_models import Model
from tests.programs import PROGRAMS


def _model(make):
    program = make()
    answers = program.answers.items()
    exact = {f"^{re.escape(path)}$": answer for path, answer in answers}
    return Model(lambda: (program.loss, program.params, program.args), exact)


MODELS = {name: _model(make) for name, make in PROGRAMS.items()}

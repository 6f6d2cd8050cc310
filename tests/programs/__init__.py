"""Small programs in plain JAX, with the right reading of every parameter.

Each program is a loss in one of the styles in which people write models: a form of
experts, of attention, of layers, of products between parameters. `PROGRAMS` has all of
them by name. A test reads each by its loss and compares every leaf with the answer
before its shape, which was written from the code and not from what the reader said:

    @program(
        floats(BATCH, 9),
        up=Leaf("io or adamw", 9, WIDTH),
        down=Leaf("head", WIDTH, 3),
    )
    def two_layers(p, x):
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

Most programs are a few lines of a language model: `between` and `language_model` make a
loss of a function of x and the parameters alone. An answer is

- one letter an axis, b(atch), i(n) or o(ut), of a matrix that Muon gets, with its role
  after a comma if the loss shows more than a product ("ioo, query"). Axes of size 1 are
  not compared;
- "embedding", "head", "router" or "unused": AdamW gets it, and this is its role;
- "adamw": AdamW gets it;
- several with " or " between them: any of them is right;
- "refused": either of two parameters may be like data, and reading them is an error;
- with a "?" at the end: the loss does not determine it, so another answer is no error.

`benchmarks.reading_models` has the same for the models of other packages.
"""

from tests.programs import (  # noqa: F401
    attention,
    experts,
    language,
    later,
    layers,
    models,
    products,
    streams,
)
from tests.programs.parts import PROGRAMS

__all__ = ["PROGRAMS"]

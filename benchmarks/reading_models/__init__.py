"""Models of six packages, with the right reading of every parameter.

A module here is a package: its `MODELS` has a `Model` by name, which builds the model
without values, and a loss of it. The answers were written from the package's code, not
from what a reader said. `benchmarks/NOTES_reading.md` has the result.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

# The module of each framework, and the folder of outside/ whose environment it needs;
# None: that of `make test`.
FRAMEWORKS: Mapping[str, str | None] = {
    "flax": None,
    **{x: x for x in ("transformers", "maxtext", "levanter", "tunix", "keras_hub")},
}
BATCH, LENGTH = 2, 16


@dataclasses.dataclass(frozen=True)
class Model:
    """A loss of a model, and the right reading of its parameters.

    Attributes:
      build: returns the loss, the parameters and the other arguments, as shapes.
      answers: from regular expressions to answers in the notation of `tests.programs`.
        The first that is found in a path decides. Of several choices those with as many
        letters as the parameter has axes count. Arrays with fewer than two axes that
        are longer than 1 need no answer: they are "adamw".
      stacked: from regular expressions to the axes that scans or `vmap` take, which
        the answers leave out. The first that is found in a path decides.
    """

    build: Callable[[], tuple[Callable[..., Any], Any, tuple[Any, ...]]]
    answers: Mapping[str, str]
    stacked: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def answer(self, path: str, shape: Sequence[int]) -> str:
        """The right reading of a parameter, with the axes that the answers leave out.

        Raises:
          ValueError: no answer fits.
        """
        layers = _first(self.stacked, path) or ()
        inner = [axis for axis in range(len(shape)) if axis not in layers]
        if sum(shape[axis] > 1 for axis in inner) < 2:
            return "adamw"
        text = _first(self.answers, path)
        if text is None:
            raise ValueError(f"no answer for {path!r} {tuple(shape)}")
        choices = []
        for choice in text.removesuffix("?").split(" or "):
            if not {*choice} <= {*"bio"}:
                choices.append(choice)
            elif len(choice) == len(inner):
                letters = dict(zip(inner, choice, strict=True))
                whole = [letters.get(axis, "b") for axis in range(len(shape))]
                choices.append("".join(whole))
        if not choices:
            raise ValueError(f"answer {text!r} for {path!r} {tuple(shape)}")
        return " or ".join(choices) + "?" * text.endswith("?")


def _first(table: Mapping[str, Any], path: str) -> Any:
    """The value of the first expression that is found in the path, or None."""
    return next((value for key, value in table.items() if re.search(key, path)), None)


# --- what the models share ------------------------------------------------------------


def floats(*shape: int) -> Any:
    """The shape of a float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape: int) -> Any:
    """The shape of an int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def zeros(tree: Any) -> Any:
    """The same tree with zeros in the place of shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


TOKENS = integers(BATCH, LENGTH)


def nnx_model(module: Any, loss_fn: Any, *inputs: Any, variables: Any = None) -> Any:
    """A loss of an NNX module without values; `variables` are its parameters."""
    from flax import nnx  # which not every package here needs

    graph, params, rest = nnx.split(module, variables or nnx.Param, ...)

    def loss(pure: Any, rest: Any, *inputs: Any) -> Any:
        nnx.replace_by_pure_dict(params, pure)
        return loss_fn(nnx.merge(graph, params, rest), *inputs)

    pure, rest = jax.eval_shape(lambda: (nnx.to_pure_dict(params), rest))
    return loss, pure, (rest, *inputs)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean over all labels."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def any_loss(outputs: Any) -> Any:
    """A loss of all floating-point outputs, for models whose labels do not matter.

    Along the last axis it is a cross entropy with the label 0, or a mean of squares
    where that axis has one element.
    """
    total = 0.0
    for x in jax.tree.leaves(outputs):
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(jnp.float32)
            is_class = x.ndim and x.shape[-1] > 1
            total += jnp.mean(jax.nn.log_softmax(x)[..., 0] if is_class else x**2)
    return total

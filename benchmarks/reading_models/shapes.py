"""What the models share: sizes, shapes, and losses of whatever a model returns."""

import jax
import jax.numpy as jnp
import optax

BATCH, LENGTH, VOCAB, WIDTH = 2, 16, 96, 24


def floats(*shape):
    """The shape of a float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape):
    """The shape of an int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def shapes_of(tree):
    """The same tree with shapes in the place of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def zeros(tree):
    """The same tree with zeros in the place of shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def nnx_model(module, loss_fn, *inputs, variables=None):
    """A loss of an NNX module without values; `variables` are its parameters."""
    from flax import nnx  # which not every package here needs

    graph, params, rest = nnx.split(module, variables or nnx.Param, ...)

    def loss(pure, rest, *inputs):
        nnx.replace_by_pure_dict(params, pure)
        return loss_fn(nnx.merge(graph, params, rest), *inputs)

    pure = shapes_of(nnx.to_pure_dict(params))
    return loss, pure, (shapes_of(rest), *inputs)


def cross_entropy(logits, labels):
    """Mean over all labels."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def any_loss(outputs):
    """A loss of all floating-point outputs, for models whose labels do not matter.

    Along the last axis it is a cross entropy with the label 0, or a mean of squares
    where that axis has one element.
    """
    total = 0.0
    for x in jax.tree.leaves(outputs):
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        x = x.astype(jnp.float32)
        is_class = x.ndim and x.shape[-1] > 1
        total += jnp.mean(jax.nn.log_softmax(x)[..., 0] if is_class else x**2)
    return total

"""The same parameters in another container, or under a second name."""

import dataclasses
import re
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.rewrites.case import Case, S, register


def names_of(params):
    """Names in the order of the leaves, with the words and numbers of their paths."""
    paths = [
        jax.tree_util.keystr(key_path, simple=True, separator="_")
        for key_path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    names = ["x_" + re.sub(r"\W", "_", path) for path in paths]
    assert len({*names}) == len(names)
    return names


def container(make, get, path="{}"):
    """The leaves in `make(names, leaves)`, from which `get(it, name)` takes each."""

    def change(case: Case):
        leaves, tree = jax.tree.flatten(case.params)
        names = names_of(case.params)

        def loss(p, *args):
            values = [get(p, name) for name in names]
            return case.loss(tree.unflatten(values), *args)

        return dataclasses.replace(
            case,
            params=make(names, leaves),
            loss=loss,
            paths=[path.format(name) for name in names],
        )

    return change


def as_dict(names, leaves):
    return dict(zip(names, leaves, strict=True))


def as_named_tuple(names, leaves):
    return NamedTuple("Parameters", [(name, Any) for name in names])(*leaves)


def as_dataclass(names, leaves):
    made = dataclasses.make_dataclass("Parameters", names)
    return jax.tree_util.register_dataclass(made, names, [])(*leaves)


def as_equinox(names, leaves):
    fields = {"__annotations__": dict.fromkeys(names, Any)}
    return type("Parameters", (eqx.Module,), fields)(*leaves)


def as_boxes(names, leaves):
    return {
        name: nn.Partitioned(w, (None,) * w.ndim)
        for name, w in zip(names, leaves, strict=True)
    }


def as_state(names, leaves):
    return nnx.State({n: nnx.Param(w) for n, w in zip(names, leaves, strict=True)})


class Module(nnx.Module):
    """Parameters under any names."""


def as_module(names, leaves):
    """A module `a` with all parameters."""
    module = Module()
    module.a = Module()
    for name, w in zip(names, leaves, strict=True):
        setattr(module.a, name, nnx.Param(jnp.zeros(w.shape, w.dtype)))
    return module


def shared_module(names, leaves):
    """The same module as `a` and `b`."""
    module = as_module(names, leaves)
    module.b = module.a
    return module


def among_others(names, leaves):
    """Beside integers, keys, numbers and None."""
    others = {"key": S((2,), jnp.uint32), "step": S((), jnp.int32)}
    return {"z": as_dict(names, leaves), **others, "none": None, "rate": 0.1}


def item(p, name):
    return p[name]


register(
    "container",
    {
        "dict": container(as_dict, item),
        "NamedTuple": container(as_named_tuple, getattr),
        "dataclass": container(as_dataclass, getattr),
        "Equinox module": container(as_equinox, getattr),
        "linen boxes": container(as_boxes, lambda p, name: p[name].value),
        "nnx.State": container(as_state, lambda p, name: p[name][...]),
        "NNX module": container(
            as_module, lambda p, name: getattr(p.a, name)[...], "a/{}"
        ),
        "NNX module by its second name": container(
            shared_module, lambda p, name: getattr(p.b, name)[...], "a/{}"
        ),
        "beside keys and numbers": container(
            among_others, lambda p, name: p["z"][name], "z/{}"
        ),
    },
)


def as_listed(case: Case):
    """The leaves in a list, in their order."""
    leaves, tree = jax.tree.flatten(case.params)
    if any("router" in name for name in names_of(case.params)):
        return None  # its name decides

    def loss(p, *args):
        return case.loss(tree.unflatten(p), *args)

    paths = [str(i) for i in range(len(leaves))]
    return dataclasses.replace(case, params=leaves, loss=loss, paths=paths)


def of_leaves(function):
    def change(case: Case):
        params = jax.tree.map(lambda w: function(w.shape, w.dtype), case.params)
        return dataclasses.replace(case, params=params)

    return change


register(
    "container",
    {
        "list": as_listed,
        "NumPy arrays": of_leaves(np.zeros),
    },
)

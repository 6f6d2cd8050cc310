"""How tests say what they know of a tree before there is one."""

import functools

import jax_muon as jm


def reader(rules=None, **settings):
    """`jax_muon.read` with settings, for `matrices=`."""
    return functools.partial(jm.read, rules=rules, **settings)

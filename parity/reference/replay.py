"""Feed recorded gradients to an optimizer: the loop that all comparisons share."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Named = dict[str, Tensor]  # by parameter name


def groups_over(params: Named, groups: Iterable[dict]) -> list[dict]:
    """Turn groups whose "params" are names into groups whose "params" are tensors."""
    return [
        {**group, "params": [params[k] for k in group["params"]]} for group in groups
    ]


def replay(
    make_optimizer: Callable[[list[dict]], torch.optim.Optimizer],
    params: Named,
    groups: Sequence[dict],
    grads: Sequence[Named],
    rates: Sequence[Sequence[dict]] | None = None,
) -> list[Named]:
    """Run one step for each entry of `grads`, on copies of `params`.

    Args:
        make_optimizer: takes the groups, with tensors for names.
        params: the parameters before the first step.
        groups: the optimizer's groups, each with names under "params".
        grads: for each step, the gradient of every parameter.
        rates: for each step, for each group, the settings that change before it.

    Returns:
        The parameters after each step.
    """
    params = {k: torch.nn.Parameter(v.clone()) for k, v in params.items()}
    optimizer = make_optimizer(groups_over(params, groups))
    after = []
    for step, grad in enumerate(grads):
        for group, changed in zip(
            optimizer.param_groups,
            rates[step] if rates else (),
            strict=rates is not None,
        ):
            group.update(changed)
        for name, p in params.items():
            p.grad = grad[name].to(p.dtype, copy=True)
        optimizer.step()
        after.append({k: p.detach().clone() for k, p in params.items()})
    return after

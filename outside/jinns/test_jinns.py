"""jinns: `solve` with Adam, and with the same Adam for all but matrices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jinns
import optax

import jax_muon as jm

RATE = 1e-3


class Pendulum(jinns.loss.ODE):
    """u'' = -sin(u), with u'' from two derivatives of the network."""

    def equation(self, t, u, params):
        speed = jax.grad(lambda t: u(t, params)[0])
        return jax.grad(lambda t: speed(t)[0])(t) + jnp.sin(u(t, params))


def test_solve():
    """Kernels show their use only in derivatives with respect to time."""
    key, width = jax.random.key(0), 32
    network, weights = jinns.nn.PINN_MLP.create(
        key=key,
        eq_type="ODE",
        eqx_list=(
            (eqx.nn.Linear, 1, width),
            (jax.nn.tanh,),
            (eqx.nn.Linear, width, width),
            (jax.nn.tanh,),
            (eqx.nn.Linear, width, width),
            (jax.nn.tanh,),
            (eqx.nn.Linear, width, 1),
        ),
    )
    params = jinns.parameters.Params(nn_params=weights, eq_params={})
    loss = jinns.loss.LossODE(
        u=network,
        dynamic_loss=Pendulum(),
        initial_condition=(0.0, jnp.array([1.0])),
        loss_weights=jinns.loss.LossWeightsODE(dyn_loss=1.0, initial_condition=10.0),
        params=params,
    )
    data = jinns.data.DataGeneratorODE(key=key, nt=64, tmin=0.0, tmax=2.0)
    batch = data.get_batch()[1]
    matrices = jm.find_matrices(
        params, lambda p, batch: loss.evaluate(p, batch)[0], batch
    )
    hidden = [x.path for x in matrices.values() if x.label == "muon"]
    assert hidden == [f"nn_params/layers/{layer}/weight" for layer in (2, 4)]
    adam = optax.adam(RATE)
    muon = jm.muon(0.01, adamw=adam, dtype="float32", matrices=matrices)
    ends = {}
    for name, optimizer in (("adam", adam), ("muon", muon)):
        _, losses, *_ = jinns.solve(
            n_iter=400,
            init_params=params,
            data=data,
            loss=loss,
            optimizer=optimizer,
            verbose=False,
        )
        ends[name] = float(losses[-1])
    print(ends)
    assert ends["muon"] < ends["adam"]

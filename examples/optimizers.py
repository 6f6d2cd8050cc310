import optax
OPTIMIZERS=("nanochat", "muon", "normuon", "moonlight", "adamw")
def make_optimizer(name, steps, learning_rate=None, adamw_learning_rate=None):
    peak = learning_rate or 3e-3
    return optax.adamw(optax.join_schedules([optax.linear_schedule(0,peak,20),optax.linear_schedule(peak,0,steps//2)],[steps//2]))

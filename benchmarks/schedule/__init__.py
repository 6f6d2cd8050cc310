"""How XLA schedules train steps for GPUs, read from compiled programs."""

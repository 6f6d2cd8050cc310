"""How XLA schedules train steps for GPUs and TPUs, read from compiled programs."""

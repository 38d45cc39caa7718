"""The loop: the only place that knows both the scheduler and a runner."""

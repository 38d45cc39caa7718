"""Obeys a StepPlan on a device and returns a StepResult. Knows no queue and no policy."""

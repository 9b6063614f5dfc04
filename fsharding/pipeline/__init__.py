"""Pipeline schedules as values, and the executor that runs them."""

from fsharding.pipeline.actions import Action
from fsharding.pipeline.executor import pipeline_grads
from fsharding.pipeline.plots import draw_schedule
from fsharding.pipeline.schedule import Schedule, check_schedule, layers_of, make_schedule, plan_schedule, stages_for
from fsharding.pipeline.stages import stages_of

__all__ = [
    "Action", "Schedule", "check_schedule", "draw_schedule", "layers_of", "make_schedule", "pipeline_grads",
    "plan_schedule", "stages_for", "stages_of",
]  # fmt: skip

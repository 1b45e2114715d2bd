"""The settings of one group: `autoscaler: {groups: {expel: {max: 8, target_cpu: 0.7}}}`."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.core.units import Duration

Size = Annotated[int, Field(ge=1, le=1000)]


class GroupRules(BaseModel):
    """How one group is scaled. CPU in cores per instance: 1.0 is one core, wholly used. Durations in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max: Size = Field(4, description="Instances at most.")
    min: Size = Field(1, description="Instances at least.")
    fault_tolerance: Size = Field(
        1, description="T: as many instances at least, so that one is left after the loss of T - 1."
    )
    target_cpu: float = Field(
        0.6, gt=0, le=64, allow_inf_nan=False, description="Average CPU of an instance that is aimed at, in cores."
    )
    tolerance: float = Field(
        0.1, ge=0, lt=1, allow_inf_nan=False, description="Share of the target by which the average may be off."
    )
    warm_up: Duration = Field(60.0, description="An instance's CPU does not count before it is so old.")
    cool_down: Duration = Field(30.0, description="Time between two actions; between opposite ones twice as long.")
    calm: Duration = Field(180.0, description="One instance less must have been enough for so long.")
    max_lag: Duration = Field(60.0, description="With more lag than this the group grows although its CPU is low.")

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.max < self.floor:
            raise ValueError(f"max is {self.max}, but min and fault_tolerance ask for {self.floor}")
        return self

    @property
    def floor(self) -> int:
        """Never fewer instances."""
        return max(self.min, self.fault_tolerance)

"""The steps in a terminal: a line each, with a bar for the CPU."""

import math

from services.fleet.rating.steps import Rating, Step

WIDTH = 24
_PARTS = " ▏▎▍▌▋▊▉█"
HEAD = f"{'offered/s':>10} {'done/s':>10} {'lag':>8}  CPU (cores)"


def bar(share: float) -> str:
    """A bar of `WIDTH` characters for a share of 1; more is cut."""
    eighths = round(min(1.0, max(0.0, share)) * WIDTH * 8)
    return "█" * (eighths // 8) + (_PARTS[eighths % 8] if eighths % 8 else "")


def step_line(step: Step) -> str:
    """One step. The bar is full at one core."""
    mark = "" if step.kept else "  not kept"
    return f"{step.rate:>10,.0f} {step.done:>10,.0f} {step.lag:>6.1f} s  {step.cpu:4.2f} {bar(step.cpu):<{WIDTH}}{mark}"


def summary(service: str, rating: Rating) -> list[str]:
    """What follows from the steps."""
    if rating.rate == 0:
        return [f"One {service} instance did not keep pace with the first step. Try: a lower --first"]
    lines = [f"One {service} instance takes {_round(rating.rate):,} events a second here."]
    if rating.limit == "instance":
        lines.append(f"CPU reached {rating.plateau_cpu:.2f} cores; aim below that: target_cpu: {rating.target_cpu}")
    elif rating.limit == "machine":
        lines.append("The machine ran short first, of cores or of what its disk takes: more may be in the instance.")
        lines.append(f"By what was seen, target_cpu: {rating.target_cpu}")
    else:
        lines.append(f"It was never saturated: more is in it. By what was seen, target_cpu: {rating.target_cpu}")
    return lines


def _round(rate: float) -> int:
    """To two figures: more would pretend."""
    unit = 10 ** max(0, math.floor(math.log10(rate)) - 1)
    return int(rate // unit * unit)

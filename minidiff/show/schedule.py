"""Draw a schedule of checkpoints: steps downward, the time that they take to the right."""

from __future__ import annotations

from minidiff.control_flow.schedules import CheckpointSchedule

#: The look of each kind of line.
_LINES = {
    "advance": 'stroke="#4c78a8" stroke-width="2"',
    "reverse": 'stroke="#e45756" stroke-width="2"',
    "in memory": 'stroke="#9aa5b1"',
    "on disk": 'stroke="#b8860b" stroke-dasharray="4 2"',
}
_UNIT, _MARGIN = 9, 24  # pixels


class CheckpointPicture:
    """A schedule as SVG: a blue line takes steps, a red one reverses one, a gray or dashed one is a stored state."""

    def __init__(self, schedule: CheckpointSchedule, steps: int):
        states: dict[int, list[int]] = {}  # by slot: the time of the store and of the last restore, and the step
        lines, time = list[tuple[str, int, int, int, int]](), 0
        for name, step, where in schedule.actions(steps):
            if name == "store":
                states[where] = [time, step]
            elif name == "restore":
                start, step = states[where]
                kind = "in memory" if where < schedule.slots - schedule.disk else "on disk"
                lines.insert(0, (kind, start, step, time, step))
            else:
                ends = (step, where) if name == "advance" else (step + 1, step)
                start, time = time, time + abs(ends[1] - ends[0])
                lines.append((name, start, ends[0], time, ends[1]))
        width, height = 2 * _MARGIN + _UNIT * max(time, 56), 3 * _MARGIN + _UNIT * steps
        title = f"{steps} steps, {schedule.slots} slots: {schedule.advances(steps)} steps again"
        keys = "".join(f'<tspan dx="16" fill="{look[8:15]}">{kind}</tspan>' for kind, look in _LINES.items())
        text = f'<text x="{_MARGIN}" y="{height - _MARGIN / 2}" font-family="sans-serif" font-size="13">'
        self.source = "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
                '<rect width="100%" height="100%" fill="white"/>',
                *[f'<path d="{_path(*line[1:])}" {_LINES[line[0]]}/>' for line in lines],
                f"{text}{title}{keys}</text>",
                "</svg>\n",
            ]
        )

    def pipe(self, format: str) -> bytes:
        """Return the picture's bytes."""
        if format != "svg":
            raise ValueError(f"draw: a schedule is drawn as .svg, not .{format}")
        return self.source.encode()


def _path(*coordinates: int) -> str:
    return "M{} {}L{} {}".format(*[_MARGIN + _UNIT * x for x in coordinates])

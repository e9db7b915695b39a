"""What one life of a router has counted, and what of it the book is known to have (cluster/usage.py). Pure."""

from dataclasses import dataclass

from cluster.usage import NOTHING, Day, Rows, Sums, Who, is_open


class Sheet:
    """All sums of this life, by day, until their days are closed and written.

    rows = sheet.unwritten(); then for each day one of `written`, `doubtful` (no answer), `refused` (the day is closed)
    """

    def __init__(self) -> None:
        self._days: dict[Day, dict[Who, _Line]] = {}
        self._changed: set[tuple[Day, Who]] = set()
        self._gone: dict[Who, Sums] = {}

    def add(self, day: Day, who: Who, sums: Sums) -> None:
        """Count."""
        lines = self._days.get(day)
        if lines is None:
            lines = self._days[day] = {}
        line = lines.get(who)
        if line is None:
            line = lines[who] = _Line()
        line.counted = line.counted.plus(sums)
        self._changed.add((day, who))

    def unwritten(self) -> dict[Day, dict[Who, Sums]]:
        """The sums that the book does not have for sure."""
        rows: dict[Day, dict[Who, Sums]] = {}
        for day, who in self._changed:
            rows.setdefault(day, {})[who] = self._days[day][who].counted
        return rows

    def written(self, day: Day, rows: Rows) -> None:
        """The book has these."""
        for who, sums in rows.items():
            line = self._days[day][who]
            line.perhaps = line.perhaps.joined(sums)
            if line.counted == sums:
                self._changed.discard((day, who))

    def doubtful(self, day: Day, rows: Rows) -> None:
        """The book has these, or not: it did not say."""
        for who, sums in rows.items():
            line = self._days[day][who]
            line.perhaps = line.perhaps.joined(sums)

    def refused(self, day: Day, today: Day) -> bool:
        """The day is closed: what the book cannot have of it counts as of today. Never twice, if in doubt.

        Returns whether there was anything.
        """
        moved = False
        for who, line in self._days.pop(day).items():
            self._changed.discard((day, who))
            self._gone[who] = self._gone.get(who, NOTHING).plus(line.perhaps)
            if any(rest := line.counted.less(line.perhaps)):
                self.add(today, who, rest)
                moved = True
        return moved

    def recall(self) -> None:
        """Everything is to be written again: the book may have forgotten."""
        self._changed.update((day, who) for day, lines in self._days.items() for who in lines)

    def forget(self, today: Day) -> None:
        """Let go of days that are closed and written."""
        busy = {day for day, _ in self._changed}
        for day in [day for day in self._days if not is_open(day, today) and day not in busy]:
            for who, line in self._days.pop(day).items():
                self._gone[who] = self._gone.get(who, NOTHING).plus(line.counted)

    def total(self) -> dict[Who, Sums]:
        """All that was counted in this life, over all days."""
        total = dict(self._gone)
        for lines in self._days.values():
            for who, line in lines.items():
                total[who] = total.get(who, NOTHING).plus(line.counted)
        return total

    def waiting(self) -> int:
        """Sums that are not written yet."""
        return len(self._changed)


@dataclass(slots=True)
class _Line:
    """`perhaps`: at most so much the book may have."""

    counted: Sums = NOTHING
    perhaps: Sums = NOTHING

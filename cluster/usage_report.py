"""Usage as people and programs read it: one line for a day, a tenant and a model, with what it costs. Pure.

`cost` = ((input - cached) x input price + cached x cached price + output x output price) / 1,000,000, by the prices of
now, in exact decimals; None where the model has no price.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from cluster.core.config import PriceSettings, UsageSettings
from cluster.usage import NOTHING, Day, Sums, Who, day_from, iso

COLUMNS = ("day", "tenant", "model", *Sums._fields, "cost", "currency")
MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Line:
    """What one tenant used of one model on one day."""

    day: Day
    who: Who
    sums: Sums
    cost: Decimal | None
    currency: str

    def values(self) -> dict[str, str | int | None]:
        """By COLUMNS."""
        cost = None if self.cost is None else plain(self.cost)
        named = {"day": iso(self.day), "tenant": self.who.tenant, "model": self.who.model}
        return {**named, **self.sums._asdict(), "cost": cost, "currency": self.currency if cost is not None else None}


def cost_of(sums: Sums, price: PriceSettings) -> Decimal:
    """In the price's currency."""
    cached_price = price.input if price.cached is None else price.cached
    computed = sums.input_tokens - sums.cached_tokens
    total = computed * price.input + sums.cached_tokens * cached_price + sums.output_tokens * price.output
    return total / MILLION


def lines_of(days: Mapping[Day, Mapping[Who, Sums]], settings: UsageSettings) -> list[Line]:
    """Priced, in the order of days, tenants and models."""
    lines = []
    for day, rows in sorted(days.items()):
        for who, sums in sorted(rows.items()):
            price = settings.price_of(who.model)
            lines.append(Line(day, who, sums, None if price is None else cost_of(sums, price), settings.currency))
    return lines


def added(lines: Iterable[Line]) -> list[Line]:
    """Lines of several routers that share no book, as one list."""
    total: dict[tuple[Day, Who], Line] = {}
    for line in lines:
        known = total.get((line.day, line.who), Line(line.day, line.who, NOTHING, None, line.currency))
        cost = line.cost if known.cost is None else known.cost + (line.cost or 0)
        total[line.day, line.who] = Line(line.day, line.who, known.sums.plus(line.sums), cost, line.currency)
    return [total[key] for key in sorted(total)]


def line_from(values: Mapping[str, str | int | None]) -> Line:
    """What `Line.values` made. Raises KeyError, ValueError, ArithmeticError for what it did not."""
    sums = Sums(*(int(values[name] or 0) for name in Sums._fields))
    cost = values["cost"]
    who = Who(str(values["tenant"]), str(values["model"]))
    priced = None if cost is None else Decimal(str(cost))
    return Line(day_from(str(values["day"])), who, sums, priced, str(values["currency"] or ""))


def csv_text(lines: Iterable[Line]) -> str:
    """With a head; lines end as RFC 4180 has it."""
    out = io.StringIO(newline="")
    table = csv.DictWriter(out, COLUMNS)
    table.writeheader()
    table.writerows(line.values() for line in lines)
    return out.getvalue()


def plain(number: Decimal) -> str:
    """Without an exponent, and without zeros that say nothing."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text

"""What a router has heard of one attempt."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from cluster.stubs.session_pb2 import FromDecode, SampleState


@dataclass
class Answer:
    """What a router would have received for one attempt."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    starts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    events: list[FromDecode] = field(default_factory=list)
    decode: str = ""
    histories: list[SampleState] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return bool(self.lost) or len(self.ends) == sum(not s.finished for s in self.histories)

    def offset(self, index: int) -> int:
        """Where sample `index` stands, as in a ResumeAttempt."""
        state = self.histories[index]
        ended = state.finished or index in self.ends
        return -1 if ended else len(state.emitted) + len(self.tokens[index])

    def next_scored(self) -> int:
        """The next position of the prompt whose log-probability is wanted, as in a ResumeAttempt."""
        heard = [e.scored for e in self.events if e.WhichOneof("message") == "scored"]
        return heard[-1].start + len(heard[-1].ranks) // 4 if heard else 1

    lost: str = ""  # why the attempt ended without its ends

    @property
    def prefill_on(self) -> list[str]:
        told = [e.prefill_on.worker for e in self.events if e.WhichOneof("message") == "prefill_on"]
        return [name for name, _ in groupby(told)]  # told again when it is known how much was cached there

    @property
    def handed_off(self) -> Any:
        return next((e.handed_off for e in self.events if e.WhichOneof("message") == "handed_off"), None)

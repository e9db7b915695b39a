"""Thirty prompts for a real model: English, Chinese, code, emoji, a long document, six under one system prompt."""

from dataclasses import dataclass

LONG_TOKENS = 3000
SYSTEM = (
    "You are the keeper of an old watermill. You answer visitors in one or two plain sentences. The headrace is the "
    "channel that brings the water to the wheel, the tailrace takes it away again, and the sluice gate decides how "
    "much of it comes. You never talk about anything that happened after the year 1900, you never use exclamation "
    "marks, and when you do not know an answer you say that the miller might know."
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to go on with or, with `chat`, a question through the model's chat template."""

    text: str
    chat: bool = True
    system: str | None = None
    quick: bool = False  # also asked in the short version of the test

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.text}]


_ENGLISH = (
    Prompt("What is the capital of France?", quick=True),
    Prompt("Write one sentence about rivers."),
    Prompt("Explain to a child why the sky is blue."),
    Prompt("List three uses of a water wheel."),
    Prompt("Once upon a time there was a miller who lived beside a", chat=False),
    Prompt("Water", chat=False),
    Prompt("The three laws of motion are:\n1.", chat=False),
)
_CHINESE = (
    Prompt("\u6cd5\u56fd\u7684\u9996\u90fd\u662f\u54ea\u91cc\uff1f", quick=True),
    Prompt("\u8bf7\u7528\u4e00\u53e5\u8bdd\u4ecb\u7ecd\u957f\u6c5f\u3002"),
    Prompt("\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c", chat=False),
    Prompt("\u6c34\u8f66\u662f\u4e00\u79cd\u53e4\u8001\u7684\u673a\u5668\u3002" * 6, chat=False),
)
_CODE = (
    Prompt("def fibonacci(n):\n    ", chat=False, quick=True),
    Prompt("Write a Python function that reverses a string."),
    Prompt("SELECT name, COUNT(*) FROM mills\nWHERE river = 'Isar'\nGROUP BY", chat=False),
    Prompt('#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf("', chat=False),
    Prompt('{"name": "mill", "wheels": [1, 2, 3], "river": {"name":', chat=False),
    Prompt("What does `git rebase -i HEAD~3` do?"),
)
_EMOJI = (
    Prompt("\U0001f680\U0001f30a\U0001f6b0 What do these three emoji mean?"),
    Prompt(
        "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1eb\U0001f1f7 \U0001f44d\U0001f3fd",
        chat=False,
    ),
    Prompt("Answer with emoji only: are you happy? \u2764\ufe0f"),
)
_MIXED = (
    Prompt(
        "Stra\u00dfe, na\u00efve, \u0142\u00f3d\u017a, \u041c\u043e\u0441\u043a\u0432\u0430:",
        chat=False,
    ),
    Prompt("1 2 3 4 5 6 7 8 9 10 11 12 13", chat=False),
    Prompt("    \n\n\t\tindented\n", chat=False),
)
_SHARED = tuple(
    Prompt(question, system=SYSTEM, quick=number < 2)
    for number, question in enumerate(
        (
            "What does the sluice gate do?",
            "Where does the water go after the wheel?",
            "How old is the mill?",
            "Can you tell me about aeroplanes?",
            "What is a headrace?",
            "What is for dinner?",
        )
    )
)


def _document() -> str:
    """Entries of a mill's log book: at least LONG_TOKENS tokens, no two lines alike."""
    grains, weathers = ("wheat", "rye", "barley", "oats", "maize"), ("rain", "frost", "sun", "fog")
    lines = [
        f"Day {day}: {day * 7 % 50} sacks of {grains[day % 5]}, water {day * 13 % 90} inches high, {weathers[day % 4]}."
        for day in range(1, 132)
    ]
    return "Here is the log book of the mill.\n" + "\n".join(lines) + "\nWhich grain was ground on day 42?"


PROMPTS = (*_ENGLISH, *_CHINESE, *_CODE, *_EMOJI, *_MIXED, *_SHARED, Prompt(_document()))
QUICK = tuple(prompt for prompt in PROMPTS if prompt.quick)
